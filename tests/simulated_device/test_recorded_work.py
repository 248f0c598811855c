"""Recorded work of the simulated accelerator does wrong what a CUDA graph would do wrong."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from simulated_device import AT_ONCE, SimulatedDevice
from simulated_device.graphs import NOT_PERMITTED


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """All work that is not recorded is done at once."""
    with SimulatedDevice(AT_ONCE) as device:
        yield device


def ones(device: SimulatedDevice) -> Tensor:
    return device.to_device(torch.ones(3))


def test_nothing_runs_while_it_is_recorded_and_all_of_it_at_each_replay(device: SimulatedDevice):
    x = ones(device)
    graph = device.record(lambda: x.mul_(2))
    assert x.tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert x.tolist() == [4, 4, 4]


def test_a_replay_reads_what_its_addresses_hold_then(device: SimulatedDevice):
    x = ones(device)
    results: list[Tensor] = []
    graph = device.record(lambda: results.append(x + 1))
    device.to_device(torch.full((3,), 5.0), into=x)
    graph.replay()
    assert results[0].tolist() == [6, 6, 6]
    x = device.to_device(torch.zeros(3))  # other memory, which the recording does not know
    graph.replay()
    assert results[0].tolist() != [1, 1, 1]


def test_a_number_of_the_host_stays_what_it_was(device: SimulatedDevice):
    numbers, x = [2.0], ones(device)
    graph = device.record(lambda: x.mul_(numbers[0]))
    numbers[0] = 10.0
    graph.replay()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.copy_(torch.zeros(3), non_blocking=True),
        lambda x: x.normal_(),
    ],
    ids=["read", "item", "copy from pageable memory", "random numbers"],
)
def test_what_a_recording_cannot_hold_is_refused(
    device: SimulatedDevice, work: Callable[[Tensor], object]
):
    x = ones(device)
    with pytest.raises(RuntimeError, match=NOT_PERMITTED):
        device.record(lambda: work(x))
    assert x.tolist() == [1, 1, 1]


def test_a_recording_waits_for_nothing(device: SimulatedDevice):
    for wait in (device.synchronize, lambda: device.current_stream().synchronize()):
        with pytest.raises(RuntimeError, match=NOT_PERMITTED):
            device.record(wait)


def test_memory_that_a_recording_frees_is_used_again_in_it(device: SimulatedDevice):
    x = ones(device)
    kept: list[Tensor] = []

    def work() -> None:
        between = x + 1
        kept.append(between * 2)

    graph = device.record(work)
    freed = kept.pop()
    view = freed.inner
    del freed
    device.record(lambda: None, beside=graph).replay()
    assert view.isnan().all()
