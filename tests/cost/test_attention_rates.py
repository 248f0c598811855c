"""Rates of attention by how it is computed, its mask and its head width."""

import pytest

from windlass.cost.attention_rates import AttentionRates
from windlass.schema.machine.rates import AttentionRate, Curve, Point


def flat(rate: float) -> Curve:
    return Curve(points=(Point(64, rate), Point(512, 2 * rate)))


def measured(head_width: int, rate: float, **way: object) -> AttentionRate:
    return AttentionRate(head_width=head_width, forward=flat(rate), backward=flat(3 * rate), **way)


RATES = (
    measured(32, 100.0),
    measured(64, 200.0),
    measured(64, 150.0, is_causal=False),
    measured(32, 400.0, attention="math"),
    measured(64, 600.0, attention="math"),
    AttentionRate(
        head_width=64, attention="math", compiled=True,
        forward=Curve(points=(Point(512, 1800.0),)), backward=Curve(points=(Point(512, 3600.0),)),
    ),
)  # fmt: skip


def rate(rates: AttentionRates, *way: object, is_causal: bool = True, backward: bool = False):
    curve = rates.curve(*way, is_causal=is_causal, backward=backward)
    return None if curve is None else curve.points[0].rate


def of(sequence: int, *, compiled: bool = False, on_cpu: bool = True) -> AttentionRates:
    return AttentionRates(RATES, sequence, compiled=compiled, interpolates=on_cpu)


def test_each_way_has_its_own_rate():
    assert rate(of(64), None, 64) == pytest.approx(200)
    assert rate(of(512), "math", 64, backward=True) == pytest.approx(3600)


def test_a_cpu_is_between_two_head_widths_and_an_accelerator_at_the_nearest():
    assert 100 < rate(of(64), None, 45) < 200
    assert rate(of(64, on_cpu=False), None, 45) == pytest.approx(100)


def test_a_width_measured_with_a_mask_only_is_without_one_as_much_slower_as_another():
    assert rate(of(64), None, 32, is_causal=False) == pytest.approx(100 * 150 / 200)


def test_without_any_measurement_all_tiles_of_a_fused_kernel_take_their_time():
    assert rate(of(128), "math", 64, is_causal=False) == pytest.approx(rate(of(128), "math", 64))
    long = rate(of(512), "math", 64, is_causal=False) / rate(of(512), "math", 64)
    assert long == pytest.approx((512 + 128) / (2 * 512))


def test_compiled_code_is_as_much_faster_at_every_length_as_at_the_measured_one():
    ratio = 1800 / 1200
    assert rate(of(64, compiled=True), "math", 32) == pytest.approx(400 * ratio)
    assert rate(of(64, compiled=True), None, 32) == pytest.approx(100)


def test_what_was_not_measured_has_no_rate():
    assert rate(of(64), "cudnn", 64) is None
