"""The simulated device itself: each mistake that it is there to find is found."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from simulated_device import AT_ONCE, SCHEDULES, Schedule, SimulatedDevice

LATE = SCHEDULES[0]
ELEMENTS = 64


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: schedule.name)
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    """A device under each schedule in turn."""
    with SimulatedDevice(request.param) as made:
        yield made


def ones(device: SimulatedDevice) -> Tensor:
    return torch.ones(ELEMENTS, device=device.torch_device)


def total(tensor: Tensor) -> float:
    return float(tensor.sum())


def test_results_are_those_of_the_cpu_under_every_schedule(device: SimulatedDevice):
    torch.manual_seed(1)
    layer, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
    expected = torch.autograd.grad(torch.tanh(layer(x)).sum(), [*layer.parameters()])
    layer.to(device.torch_device)
    loss = torch.tanh(layer(x.to(device.torch_device))).sum()
    gradients = torch.autograd.grad(loss, [*layer.parameters()])
    pairs = zip(gradients, expected, strict=True)
    assert all(torch.equal(late.cpu(), plain) for late, plain in pairs)
    assert device.simulation.faults == []


def test_work_in_another_stream_that_waits_for_an_event_sees_its_results(device: SimulatedDevice):
    side, event = device.new_stream(), device.new_event()
    x = ones(device)
    event.record(device.current_stream())
    event.wait(side)
    with device.use_stream(side):
        y = x + 1
        event.record(side)
    event.wait(device.current_stream())
    assert total(y) == 2 * ELEMENTS
    assert device.simulation.faults == []


def test_a_result_that_nobody_waited_for_is_reported_under_every_schedule(device: SimulatedDevice):
    side = device.new_stream()
    x = ones(device)
    with device.use_stream(side):
        y = x + 1
    total(y)
    assert any("reads what" in fault for fault in device.simulation.faults)


def test_a_result_that_nobody_waited_for_is_no_number():
    with SimulatedDevice(LATE) as device:
        side = device.new_stream()
        x = ones(device)
        with device.use_stream(side):
            y = x + 1
            assert not total(y) == 2 * ELEMENTS  # noqa: SIM201  NaN equals nothing


def test_memory_freed_before_its_stream_waits_is_reported_and_overwritten():
    with SimulatedDevice(LATE) as device:
        side = device.new_stream()
        x = ones(device)
        side.wait_stream(device.current_stream())
        with device.use_stream(side):
            y = x + 1
        del x
        device.current_stream().synchronize()
        side.synchronize()
        assert not total(y) == 2 * ELEMENTS  # noqa: SIM201  NaN equals nothing
        assert any("was freed" in fault for fault in device.simulation.faults)


def test_a_copy_to_pinned_memory_is_there_once_its_event_is(device: SimulatedDevice):
    host, event = torch.zeros(ELEMENTS), device.new_event()
    device.register_host_memory(host)
    x = ones(device)
    host.copy_(x, non_blocking=True)
    event.record(device.current_stream())
    event.synchronize()
    assert total(host) == ELEMENTS
    device.unregister_host_memory(host)
    assert device.simulation.faults == []


def test_pinned_memory_that_the_host_changes_too_early_is_reported_and_seen():
    with SimulatedDevice(LATE) as device:
        host = torch.ones(ELEMENTS)
        device.register_host_memory(host)
        x = torch.empty(ELEMENTS, device=device.torch_device)
        x.copy_(host, non_blocking=True)
        host.zero_()
        assert total(x) == 0
        assert any("in the host writes" in fault for fault in device.simulation.faults)


def test_pinned_memory_given_back_during_a_copy_is_reported(device: SimulatedDevice):
    host = torch.zeros(ELEMENTS)
    device.register_host_memory(host)
    host.copy_(ones(device), non_blocking=True)
    device.unregister_host_memory(host)
    assert any("unregister" in fault for fault in device.simulation.faults)


def test_pageable_memory_may_be_changed_when_a_copy_from_it_was_asked_for(device: SimulatedDevice):
    host = torch.ones(ELEMENTS)
    x = device.to_device(host)
    host.zero_()
    assert total(x) == ELEMENTS


def test_an_operation_that_mixes_host_and_device_raises(device: SimulatedDevice):
    with pytest.raises(RuntimeError, match="mixes tensors"):
        ones(device) + torch.ones(ELEMENTS)
    assert total(ones(device) + torch.tensor(1.0)) == 2 * ELEMENTS


def test_the_host_cannot_read_the_memory_of_the_device(device: SimulatedDevice):
    with pytest.raises((RuntimeError, TypeError)):
        ones(device).numpy()


@pytest.mark.parametrize("schedule", [AT_ONCE, *SCHEDULES], ids=lambda each: each.name)
def test_what_a_schedule_leaves_runs_when_the_host_waits(schedule: Schedule):
    with SimulatedDevice(schedule) as device:
        side, event = device.new_stream(), device.new_event()
        with device.use_stream(side):
            x = ones(device) * 3
            event.record(side)
        device.synchronize()
        assert event.query()
        assert total(x) == 3 * ELEMENTS
        assert device.simulation.faults == []
