import itertools
import math
import os
import subprocess
import sys
import time
import timeit
from itertools import cycle
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st

from windlass.hardware.local_machine import (
    last_level_cache_bytes,
    load_local_machine,
    save_local_machine,
)
from windlass.hardware.probe.attention import AttentionWay
from windlass.hardware.probe.disk_and_network import (
    CpuContention,
    available_memory_bytes,
    disk_rates,
    host_copy_rates,
    loopback_link,
)
from windlass.hardware.probe.machine_parts import sparse_product_rates
from windlass.hardware.probe.matmul import (
    MeasuredProduct,
    TimedProduct,
    converted_precisions,
    fit_product,
    fit_terms,
    matmul_rates,
    probed_precisions,
)
from windlass.hardware.probe.memory_bandwidth import elementwise_rates, op_rates
from windlass.hardware.probe.operands import ColdMemory, cold_bytes
from windlass.hardware.probe.probe import probe_machine
from windlass.hardware.probe.stopwatch import Stopwatch
from windlass.schema import MachinePart
from windlass.schema.graph import Precision
from windlass.torch_ext import CpuDevice, device_for


@pytest.fixture
def watch() -> Stopwatch:
    return Stopwatch(torch.device("cpu"), budget_seconds=0.001)


def test_work_that_sleeps_takes_as_long_as_it_sleeps(watch: Stopwatch):
    assert watch.seconds(lambda: time.sleep(0.02)) == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize(
    ("precision", "is_converted"),
    [("float32", True), ("float16", True), pytest.param("float32", False, marks=pytest.mark.slow)],
)
def test_rates_of_products_rise_in_size_order_and_never_pass_the_peak(
    watch: Stopwatch, precision: Precision, is_converted: bool
):
    calls = []
    rate = matmul_rates(
        precision, watch, lambda: calls.append(1), ways=[AttentionWay(32)],
        is_converted=is_converted,
    )  # fmt: skip
    sizes = [point.size for point in rate.curve.points]
    assert sizes == sorted(sizes)
    assert all(0 < point.rate <= rate.peak for point in rate.curve.points)
    assert len(calls) > len(sizes)
    assert {each.head_width for each in rate.attention_rates} == {32}


def shortest_product(dtype: torch.dtype) -> float:
    """Seconds of the quickest of a few products."""
    x = torch.ones(384, 384, dtype=dtype)
    return min(timeit.repeat(lambda: x @ x, number=1, repeat=5))


def test_precisions_that_clearly_take_longer_than_float32_are_converted_and_no_quick_ones():
    converted = converted_precisions(torch.device("cpu"))
    base = shortest_product(torch.float32)
    for precision in ("bfloat16", "float16"):
        times = shortest_product(getattr(torch, precision)) / base
        # Between the two a busy machine decides.
        if not 1.5 < times < 6:
            assert (precision in converted) == (times >= 6), times
    assert "tf32" not in converted
    assert not converted_precisions(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_a_gpu_has_a_rate_in_each_precision_that_its_kernels_have(tmp_path: Path):
    device = probe_machine(None, tmp_path).device
    precisions = {"float32", "bfloat16"} | ({"tf32"} if device_for("cuda:0").has_tf32() else set())
    assert {rate.precision for rate in device.matmul} == precisions
    assert not device_for("cpu").has_tf32()


def test_each_op_has_its_rate_once_in_each_precision(watch: Stopwatch):
    rates = op_rates("bfloat16", watch, lambda: None)
    assert len({rate.name for rate in rates}) == len(rates)
    assert all(point.rate > 0 for rate in rates for point in rate.curve.points)


@pytest.mark.slow
def test_sparse_products_have_a_rate_for_each_size_of_block_and_each_role(watch: Stopwatch):
    calls = []
    rates = sparse_product_rates("float32", watch, lambda: calls.append(1))
    found = {(rate.block, rate.role) for rate in rates}
    roles = ("forward", "input_gradient", "weight_gradient")
    assert found == {(block, role) for block in (16, 32, 64, 128) for role in roles}
    assert len(rates) == len(found)
    assert all(0 < rate.flop_rate < 1e15 for rate in rates)
    assert len(calls) >= 4


def test_what_is_read_in_turn_has_left_the_cache_before_it_is_read_again():
    memory = ColdMemory(torch.bfloat16, torch.device("cpu"))
    addresses = []
    for rows, columns in ((1024, 1000), (2048, 3000), (512, 4096)):
        tensors = memory.tensors(rows, columns)
        for _ in range(3):
            tensor = next(tensors)
            assert tensor.shape == (rows, columns)
            addresses.append(tensor.data_ptr())
    assert len(set(addresses)) == len(addresses)
    whole = itertools.takewhile(lambda each: each.data_ptr() != addresses[-1], tensors)
    between = sum(tensor.nbytes for tensor in whole)
    assert between + 2 * tensor.nbytes > cold_bytes() > (last_level_cache_bytes() or 0)


def test_traffic_is_a_curve_over_rising_sizes(watch: Stopwatch):
    sizes = [point.size for point in elementwise_rates(watch).points]
    assert sizes == sorted(set(sizes))


def test_measuring_a_disk_leaves_nothing_behind(tmp_path: Path):
    assert all(rate > 0 for rate in disk_rates(tmp_path / "deep" / "folder"))
    assert list((tmp_path / "deep" / "folder").iterdir()) == []


def test_host_copies_run_in_both_directions_at_a_rate_of_memory():
    for rate in host_copy_rates(torch.device("cpu")):
        assert 1e8 < rate < 1e13


def test_two_ranks_meet_on_loopback():
    link = loopback_link()
    assert link.joins == 2
    assert 0 < link.latency < 1
    assert link.rate > 1e6


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no scheduler statistics")
def test_a_thread_that_shares_its_core_waits_for_it():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        loop = (sys.executable, "-c", "print(flush=True)\nwhile True: pass")
        with subprocess.Popen(loop, stdout=subprocess.PIPE) as busy:
            assert busy.stdout is not None
            busy.stdout.readline()
            contention = CpuContention()
            end = time.perf_counter() + 0.3
            while time.perf_counter() < end:
                pass
            share = contention.take_share()
            contention.close()
            busy.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert share is not None
    assert 0.2 < share < 1


def test_free_memory_is_less_than_all_memory():
    from windlass.hardware.local_machine import total_memory_bytes

    assert 0 < available_memory_bytes() < total_memory_bytes()


@pytest.mark.slow
def test_a_probed_machine_can_be_kept_and_loaded_again(tmp_path: Path):
    reports = []
    leave = [part for part in get_args(MachinePart) if part != "heads of 32"]
    machine = probe_machine(
        lambda _, done, total: reports.append((done, total)), tmp_path, leave=leave
    )
    save_local_machine(tmp_path, machine)
    assert load_local_machine(tmp_path) == machine
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1]
    assert {rate.precision for rate in machine.device.matmul} == {"float32", "bfloat16"}
    assert machine.noise is not None
    assert set(machine.unmeasured) == set(leave)


def test_the_rates_of_products_are_found_again_from_the_times_that_they_make():
    shapes = ((16, 192, 64), (64, 1024, 1024), (256, 320, 320), (2048, 768, 192), (1024, 9000, 64))
    products = []
    for m, n, k in shapes:
        product = MeasuredProduct(m, n, k, {})
        read, written = product.moved("input_gradient", 2)
        seconds = 1e-5 + product.flop / 9e11 + read / 3e10 + written / 6e10
        product.seconds["input_gradient"] = seconds
        products.append(product)

    found = fit_product("input_gradient", products, itemsize=2)

    assert found.call_seconds == pytest.approx(1e-5)
    assert found.flop_rate == pytest.approx(9e11)
    assert (found.read, found.write) == (pytest.approx(3e10), pytest.approx(6e10))


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=16))
@settings(max_examples=50)
def test_a_product_has_a_finite_rate_however_a_busy_machine_disturbed_its_times(
    seconds: list[float],
):
    timed = [
        TimedProduct(2.0**index, 3.0 * index, 1.0 + index % 3, each)
        for index, each in enumerate(seconds)
    ]
    found = fit_terms(timed)
    assert 0 < found.flop_rate < math.inf
    assert found.call_seconds >= 0


def test_repeats_that_waited_for_a_core_do_not_count():
    waits = cycle((0.0, 0.0, 0.0, 0.9))  # before and after each repeat: every second one waited
    watch = Stopwatch(torch.device("cpu"), budget_seconds=0.05, waiting_share=lambda: next(waits))
    pauses = cycle((0.002, 0.02))

    seconds = watch.seconds(lambda: time.sleep(next(pauses)))

    assert seconds < 0.01


class DeviceBeforeAmpere(CpuDevice):
    """A device without products in bfloat16, as a V100 or T4."""

    def has_bfloat16(self) -> bool:
        return False


def test_a_device_without_bfloat16_is_measured_in_float16():
    assert probed_precisions(device_for("cpu")) == ("float32", "bfloat16")
    assert probed_precisions(DeviceBeforeAmpere(torch.device("cpu"))) == ("float32", "float16")
