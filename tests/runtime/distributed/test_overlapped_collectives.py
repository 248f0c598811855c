"""Gathers ahead of the passes and reductions behind them, on the simulated accelerator.

One process plays a rank of several: torch's fake process group makes its groups, and collectives
act as if all ranks had the same tensors, in streams as NCCL's. So the numbers mean nothing, but
they must be the same under all schedules, and what is read before it was waited for changes them.

`pytest -m slow tests/runtime/distributed/test_overlapped_collectives.py` runs all shardings under
all schedules, in ten seconds.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from factories import tiny_machine, tiny_plan
from simulated_device import AT_ONCE, SCHEDULES, Schedule, SimulatedDevice
from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.distributed import process_groups
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings
from windlass.torch_ext import Event, Stream

SHAPE = {"layers": 2, "width": 16, "heads": 2, "sequence": 8}
STEPS = 3
SHARDINGS = {"DDP": (2, (1, 1)), "ZeRO-1": (2, (1, 2)), "FSDP": (2, (2, 2)), "HSDP": (4, (2, 2))}
"""Data-parallel degree, and sharding degrees of parameters and optimizer state."""


OURS = ("ProcessGroups.reduce_grads", "PendingCollective.wait")
"""Where Windlass waits for streams; NCCL waits for the caller's stream by itself."""


class Work(NamedTuple):
    """A collective in a stream of its own, which the caller's stream may wait for."""

    done: Event
    device: SimulatedDevice

    def wait(self) -> None:
        self.done.wait(self.device.current_stream())


@contextmanager
def equal_ranks(device: SimulatedDevice, world_size: int) -> Iterator[None]:
    """Collectives of ranks that all have the same tensors."""
    nccl: Stream = device.new_stream()

    def all_gather(
        out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None, waits: bool = True
    ) -> Work | None:
        del group
        if waits:
            out.view(-1, *x.shape).copy_(x.clone())  # it may be a part of the output
            return None
        nccl.wait_stream(device.current_stream())
        with device.use_stream(nccl):
            out.view(-1, *x.shape).copy_(x)
            done = device.new_event()
            done.record(nccl)
        return Work(done, device)

    def reduce_scatter(out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None) -> None:
        out.copy_(x.view(-1, *out.shape)[0]).mul_(dist.get_world_size(group))

    def all_reduce(x: Tensor, *_: object, group: object = None, async_op: bool = False) -> None:
        assert not async_op, "an accelerator's reductions are put in their stream"
        if group is not None:
            x.mul_(2)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with ExitStack() as stack:
            for module, name, collective in (
                (process_groups, "all_gather", all_gather),
                (process_groups, "reduce_scatter", reduce_scatter),
                (dist, "all_reduce", all_reduce),
            ):
                stack.enter_context(patch.object(module, name, collective))
            yield
    finally:
        dist.destroy_process_group()


Run = Callable[[str, SimulatedDevice], list[tuple[float, float]]]


@pytest.fixture
def run(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> Run:
    """Losses and gradient norms of a rank's first steps."""

    def go(name: str, device: SimulatedDevice) -> list[tuple[float, float]]:
        graph, (data, sharding) = graph_of(**SHAPE), SHARDINGS[name]
        plan: Plan = tiny_plan(
            graph, tiny_machine(), micro=2, accumulation=2, sequence=8, data=data,
            sharding=sharding,
        )  # fmt: skip
        context = RankContext(
            plan=plan, stack=gpt(device="meta", **SHAPE), program=lower(plan, graph)[0],
            graph=graph, checkpoints=tmp_path / "checkpoints", device=device,
            settings=settings(
                steps=100, batch=4 * data, sequence=8, save_every=100, evaluate_every=100
            ),
        )  # fmt: skip
        with equal_ranks(device, data):
            steps = train_loop(context, batches(batch=4 * data, sequence=8))
            taken = [(step.loss, step.gradient_norm) for step in islice(steps, STEPS)]
            steps.close()
        return taken

    return go


@pytest.mark.parametrize("schedule", SCHEDULES[-2:], ids=lambda schedule: schedule.name)
def test_no_schedule_of_streams_changes_a_bit_of_a_sharded_run(run: Run, schedule: Schedule):
    _assert_unchanged(run, "HSDP", schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("name", SHARDINGS)
def test_nor_does_any_schedule_of_any_sharding(run: Run, name: str, schedule: Schedule):
    _assert_unchanged(run, name, schedule)


def _assert_unchanged(run: Run, name: str, schedule: Schedule) -> None:
    with SimulatedDevice(AT_ONCE) as device:
        expected = run(name, device)
    assert all(torch.tensor(expected).isfinite().flatten())
    with SimulatedDevice(schedule) as device:
        assert run(name, device) == expected
    assert device.simulation.faults == []


def test_each_wait_for_a_collective_that_is_left_out_is_caught(run: Run):
    """Left out alone, each is noticed under some schedule: by other numbers, or by a fault."""
    with SimulatedDevice(AT_ONCE) as device:
        expected = run("HSDP", device)
        sites = [site for site in device.simulation.sites if site[1].startswith(OURS)]
    assert {site[1].partition("+")[0] for site in sites} == set(OURS)
    by_name = {schedule.name: schedule for schedule in SCHEDULES}
    for site in sites:
        assert any(
            _is_noticed(run, by_name[name], site, expected)
            for name in ("sides late", "sides early", "late")
        ), site


def _is_noticed(
    run: Run, schedule: Schedule, site: tuple[str, ...], expected: list[tuple[float, float]]
) -> bool:
    with SimulatedDevice(schedule, drop=frozenset({site})) as device:
        try:
            taken = run("HSDP", device)
        except Exception:  # noqa: BLE001  NaN ends a run, whatever it breaks
            return True
    return bool(device.simulation.faults) or taken != expected
