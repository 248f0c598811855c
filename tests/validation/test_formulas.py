"""Formulas of cost, against closed forms that papers print."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from windlass.validation.formulas import (
    activation_bytes,
    all_reduce_seconds,
    block_parameters,
    pipeline_slots,
    product_seconds,
    ring_bytes,
    ring_rate,
    smooth_max,
    step_flop,
)

GIB = 2.0**30
PRINTED = 5e-4
"""Korthikanti's percentages are printed to two decimals."""
RATE = 1e14


def _product(rows: float, columns: float, depth: float, *, whole_waves: float = 1.0) -> float:
    seconds = product_seconds(
        np.array([rows]), np.array([columns]), np.array([depth]), flop_rate=RATE, processors=100.0,
        ramp=50.0, whole_waves=whole_waves,
    )  # fmt: skip
    return float(seconds[0])


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 9))
def test_more_rows_columns_or_depth_are_never_faster(
    rows: int, columns: int, depth: int, times: int
):
    once = _product(rows, columns, depth)

    assert _product(rows * times, columns, depth) >= once
    assert _product(rows, columns * times, depth) >= once
    assert _product(rows, columns, depth * times) >= once


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000))
def test_no_product_is_faster_than_its_flop_at_the_full_rate(rows: int, columns: int, depth: int):
    assert _product(rows, columns, depth) >= 2.0 * rows * columns * depth / RATE


def test_a_large_deep_product_comes_near_the_full_rate():
    size = 64 * 256.0

    flop = 2.0 * size**3
    assert _product(size, size, size) == pytest.approx(flop / RATE, rel=0.05)


def test_a_wave_that_is_not_full_costs_more_where_waves_are_whole():
    tiles = 101  # one more than there are processors

    whole = _product(128.0, 256.0 * tiles, 4096.0)
    shared = _product(128.0, 256.0 * tiles, 4096.0, whole_waves=0.0)
    full = _product(128.0, 256.0 * 100, 4096.0)

    assert whole > 1.5 * full
    assert shared == pytest.approx(full * tiles / 100)


@pytest.mark.parametrize(
    ("width", "heads", "printed"),
    [(6144.0, 64.0, 59.25 / 48), (12288.0, 96.0, 66.84375 / 96 / 1.0)],
)
def test_activations_of_a_layer_are_those_of_korthikanti(
    width: float, heads: float, printed: float
):
    micro = 4.0 if width == 6144.0 else 1.0
    slices, stages_times_overhang = 8.0, 1.0 if width == 6144.0 else 1.0 + 7.0 / 24.0
    tokens = np.array([micro * 2048.0])

    mine = activation_bytes(
        tokens, width, heads, 2048.0, slices, cut_sequence=0.0, scores=1.0
    )  # fmt: skip

    assert float(mine[0]) / GIB * stages_times_overhang == pytest.approx(printed, rel=PRINTED)


def test_sequence_parallel_and_selective_recompute_leave_34_bytes_over_t():
    tokens = np.array([2048.0])

    mine = activation_bytes(tokens, 12288.0, 96.0, 2048.0, 8.0, cut_sequence=1.0, scores=0.0)

    assert float(mine[0]) == pytest.approx(2048 * 12288 * 34 / 8)


def test_a_blocks_weights_are_12_d_squared():
    weights = block_parameters(np.array([4096.0]), np.array([4.0 * 4096]), 1.0, 2.0)

    assert float(weights[0]) == 12 * 4096.0**2


def test_a_llama_block_has_the_weights_of_its_published_shapes():
    weights = block_parameters(np.array([4096.0]), np.array([14336.0]), 8.0 / 32.0, 3.0)

    q_and_o, k_and_v, gated = 2 * 4096 * 4096, 2 * 4096 * 1024, 3 * 4096 * 14336
    assert float(weights[0]) == q_and_o + k_and_v + gated


def test_model_flop_of_gpt3_is_what_the_palm_paper_counts():
    flop = step_flop(np.array([1.0]), 175e9, 96.0, 12288.0, 2048.0)

    assert float(flop[0]) == pytest.approx(6 * 175e9 + 12 * 96 * 12288 * 2048)


@given(st.integers(1, 512), st.floats(1, 1e12))
def test_an_all_reduce_sends_each_byte_twice_but_for_what_a_rank_has(ranks: int, nbytes: float):
    sent = 2.0 * float(ring_bytes(np.array([nbytes]), float(ranks))[0])

    assert sent == pytest.approx(2.0 * (ranks - 1) / ranks * nbytes)


def test_rings_that_leave_a_host_side_by_side_share_its_cards():
    def rate(ranks: float, stride: float) -> float:
        found = ring_rate(
            np.array([ranks]), np.array([stride]), per_host=8.0, devices=64.0, inner=250e9,
            cards=100e9,
        )  # fmt: skip
        return float(found[0])

    assert rate(8.0, 1.0) == 250e9  # within the host
    assert rate(64.0, 1.0) == 100e9  # one ring through all of a host's devices
    assert rate(8.0, 8.0) == pytest.approx(100e9 / 8)  # eight rings of one device a host each
    assert rate(16.0, 4.0) == pytest.approx(100e9 / 4)


def _all_reduce(ranks: float, stride: float) -> float:
    """Seconds for 1 GB on hosts of 8 that share 100 GB/s, with 250 GB/s within."""
    found = all_reduce_seconds(
        np.array([1e9]), np.array([ranks]), np.array([stride]), per_host=8.0, devices=512.0,
        inner=250e9, cards=100e9,
    )  # fmt: skip
    return float(found[0])


def test_an_all_reduce_within_a_host_is_a_ring_and_between_two_sends_half_each_way():
    assert _all_reduce(1.0, 1.0) == 0.0
    assert _all_reduce(8.0, 1.0) == pytest.approx(2 * 7 / 8 * 1e9 / 250e9)
    assert _all_reduce(16.0, 1.0) == pytest.approx(1e9 / 100e9)
    assert _all_reduce(4.0, 4.0) == pytest.approx(1e9 / 25e9)  # two of a host's four rings' ranks


@given(st.integers(1, 64), st.sampled_from([1.0, 2.0, 4.0, 8.0]))
def test_an_all_reduce_between_hosts_is_never_slower_than_a_ring_through_all_ranks(
    ranks: int, stride: float
):
    rate = ring_rate(
        np.array([float(ranks)]), np.array([stride]), per_host=8.0, devices=512.0, inner=250e9,
        cards=100e9,
    )  # fmt: skip
    ring = 2.0 * (ranks - 1) / ranks * 1e9 / float(rate[0])

    assert _all_reduce(float(ranks), stride) <= ring * (1 + 1e-9)


@given(st.integers(1, 64), st.integers(1, 64))
def test_interleaving_never_lengthens_a_pipeline(micros: int, stages: int):
    plain = pipeline_slots(np.array([micros], dtype=float), float(stages))
    woven = pipeline_slots(np.array([micros], dtype=float), float(stages), 2.0)

    assert woven[0] <= plain[0]
    assert plain[0] == micros + stages - 1


@given(st.floats(1e-9, 1e6), st.floats(1e-9, 1e6))
def test_two_lanes_take_at_least_the_longer_and_at_most_both(one: float, other: float):
    both = float(smooth_max(np.array([one]), np.array([other]))[0])

    assert max(one, other) * (1 - 1e-9) <= both <= (one + other) * (1 + 1e-9)
