"""Machine: rate curves, and valid machine files."""

from math import log
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from factories import tiny_machine
from windlass.errors import InputErrors
from windlass.schema.machine import Device, Machine, Tier
from windlass.schema.machine.provenance import Source, source_of
from windlass.schema.machine.rates import Curve, Point

positive = st.floats(1e-3, 1e15)
curves = st.lists(
    st.tuples(positive, positive), min_size=1, max_size=6, unique_by=lambda p: round(log(p[0]), 9)
)
curves = curves.map(lambda pairs: Curve(points=tuple(Point(*pair) for pair in sorted(pairs))))


@given(curve=curves)
def test_a_curve_goes_through_its_points(curve: Curve):
    for point in curve.points:
        assert curve.at(point.size) == pytest.approx(point.rate)


@given(curve=curves, size=positive)
def test_a_curve_never_leaves_the_range_of_its_rates(curve: Curve, size: float):
    rates = [point.rate for point in curve.points]
    assert min(rates) * (1 - 1e-9) <= curve.at(size) <= max(rates) * (1 + 1e-9)


@given(curve=curves)
def test_beyond_the_ends_the_nearest_rate_holds(curve: Curve):
    assert curve.at(curve.points[0].size / 2) == curve.points[0].rate
    assert curve.at(curve.points[-1].size * 2) == curve.points[-1].rate


@given(exponent=st.floats(0, 2), size=st.floats(1, 1e9))
def test_between_points_a_curve_is_a_power_law(exponent: float, size: float):
    curve = Curve(points=(Point(1, 1), Point(1e9, 1e9**exponent)))
    assert curve.at(size) == pytest.approx(size**exponent)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "at least 1"),
        ([(0, 1)], "above 0"),
        ([(1, 0)], "above 0"),
        ([(1, float("nan"))], "above 0"),
        ([(1, float("inf"))], "above 0"),
        ([(2, 1), (1, 1)], "sizes must rise"),
        ([(2, 1), (2, 3)], "sizes must rise"),
    ],
)
def test_invalid_curve_points_are_refused(points: list[tuple[float, float]], reason: str):
    with pytest.raises(ValidationError, match=reason):
        Curve.model_validate({"points": points})


def test_a_device_without_memory_is_refused():
    content = tiny_machine().device.model_dump() | {"tiers": ()}
    with pytest.raises(ValidationError, match="tiers"):
        Device.model_validate(content)


def test_a_machine_file_may_use_units(tmp_path: Path):
    machine = tiny_machine(memory="2 GiB")
    text = machine.to_toml()
    assert "capacity_bytes = 2147483648" in text
    assert "update_rate = 40000000000.0" in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace("2147483648", '"2 GiB"').replace("40000000000.0", '"40 GB/s"'))
    assert Machine.load(path) == machine


def test_concurrent_reads_and_writes_take_the_longest_of_three_limits():
    turns = Tier(name="disk", capacity_bytes=1, read=2e9, write=1e9)
    assert turns.transfer_seconds(4e9, 1e9) == pytest.approx(3.0)
    at_once = turns.model_copy(update={"both": 2.5e9})
    assert at_once.transfer_seconds(4e9, 0) == pytest.approx(2.0)
    assert at_once.transfer_seconds(0, 3e9) == pytest.approx(3.0)
    assert at_once.transfer_seconds(4e9, 2e9) == pytest.approx(2.4)


def test_a_tier_without_rates_has_no_transfer_time():
    with pytest.raises(KeyError, match="states no rates"):
        Tier(name="device", capacity_bytes=1).transfer_seconds(1, 0)


def test_units_reserved_for_transfers_slow_only_plans_that_offload():
    device = tiny_machine().device.model_copy(update={"moving_share": 0.2})
    assert device.effective(offloads=False) == device
    slower = device.effective(offloads=True)
    for fast, slow in zip(device.matmul, slower.matmul, strict=True):
        assert slow.curve.at(1e8) == pytest.approx(0.8 * fast.curve.at(1e8))
    assert slower.update_rate == pytest.approx(0.8 * device.update_rate)
    assert slower.tiers == device.tiers


def test_sources_of_numbers_do_not_change_a_machines_label():
    machine = tiny_machine()
    source = Source(how="derived", source="twice another")
    told = machine.model_copy(update={"sources": {"device.update_rate": source}})
    assert told.label == machine.label
    assert told.source_of("device.update_rate") == source
    assert told.source_of("device.traffic").source == "made up for tests, 2026-01-01"


def test_the_longest_matching_pattern_gives_the_source():
    far, host, exact = (Source(how="published", source=name) for name in ("far", "host", "exact"))
    sources = {"device.*": far, "device.tiers.*": host, "device.tiers.host.read": exact}
    assert source_of("device.traffic", sources) == far
    assert source_of("device.tiers.host.write", sources) == host
    assert source_of("device.tiers.host.read", sources) == exact
    assert source_of("links.ring.rate", sources) is None


def test_one_source_is_stated_once_for_several_numbers():
    source = Source(how="fitted", source="to runs")
    sources = {"products, traffic, memory.*": source}
    for place in ("products", "traffic", "memory.activations"):
        assert source_of(place, sources) == source
    assert source_of("products, traffic", sources) is None


@given(cores=st.integers(1, 16), sharers=st.integers(1, 64))
def test_devices_that_outnumber_the_cores_have_the_overheads_of_all_that_share_one(
    cores: int, sharers: int
):
    device = tiny_machine().device.model_copy(
        update={"launch_seconds": 1e-5, "pass_seconds": 1e-4, "update_call_seconds": 1e-6}
    )
    shared, waiting = device.split(sharers, cores=cores), max(1.0, sharers / cores)
    for name in ("launch_seconds", "pass_seconds", "update_call_seconds"):
        assert getattr(shared, name) == pytest.approx(waiting * getattr(device, name))
    assert shared.matmul[0].peak == pytest.approx(device.matmul[0].peak / sharers)


def test_a_machine_file_without_a_device_is_one_sentence(tmp_path: Path):
    (path := tmp_path / "m.toml").write_text('name = "m"\nsource = "s"\ndate = "2026-01-01"\n')
    with pytest.raises(InputErrors) as caught:
        Machine.load(path)
    assert str(caught.value) == f"{path}: `device` is missing"
