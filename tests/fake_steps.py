"""Counts launches and host waits of whole training steps on the fake accelerator, and prints them.

    python tests/fake_steps.py '{"model": "gpt2-124m", "accumulation": 2}' ...

The first line of the output says what comes of operations that a step must not contain. Each
argument is a run, and each further line is the JSON of its last step: launches and waits of every
instruction by operation, and the operations whose arguments were others a step before.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from factories import HOST_OFFLOAD, catalog_graph, tiny_machine, tiny_plan
from fake_accelerator import FakeAccelerator, FakeDevice, FusedAttention, fake_device
from windlass.data import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.models import build_layer_stack
from windlass.program import lower
from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.distributed.process_groups import ProcessGroups, SingleProcess
from windlass.runtime.interpreter import Handler, Interpreter, timer_for
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.offload.transfer_queue import TransferHandle, TransferQueue, TransferStats
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext
from windlass.schema import DataRequest, Graph, Plan, TrainSettings
from windlass.torch_ext import Device


def main() -> None:
    """Runs the steps that the arguments name."""
    device = fake_device()
    print(json.dumps(faults(device)), flush=True)
    for argument in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(counts(device, Path(folder), **json.loads(argument))), flush=True)


def faults(device: FakeDevice) -> dict[str, str]:
    """What comes of operations that a step must not contain: the wait or the error."""
    with device.accelerator:
        there, here = torch.ones(4, device=device.torch_device), torch.ones(4)
        operations: dict[str, Callable[[], object]] = {
            "mix": lambda: there + here,
            "item": lambda: there.sum().item(),
            "branch": lambda: bool(there.any()),
            "read": there.cpu,
            "write": lambda: there.copy_(here),
            "new tensor": lambda: torch.tensor(1.0, device=device.torch_device),
            "asynchronous write": lambda: there.copy_(here, non_blocking=True),
            "nonzero": there.nonzero,
            "unique": there.unique,
        }
        return {name: _outcome(device, operation) for name, operation in operations.items()}


def _outcome(device: FakeDevice, operation: Callable[[], object]) -> str:
    device.accelerator.counts.clear()
    try:
        operation()
    except Exception as error:  # noqa: BLE001  torch has many types
        return type(error).__name__
    return ", ".join(device.accelerator.count.waits) or "no wait"


def counts(
    device: FakeDevice,
    folder: Path,
    *,
    model: str,
    micro: int = 4,
    sequence: int = 512,
    accumulation: int = 1,
    steps: int = 3,
    phases: Sequence[Sequence[int]] | None = None,
    data: int = 1,
    expert: int = 1,
    sharding: tuple[int, int] = (1, 1),
    dials: dict[str, float] | None = None,
) -> dict[str, Any]:
    """What the last step asks of the device."""
    graph = catalog_graph(model, **(dials or {}))
    plan = tiny_plan(
        graph, tiny_machine(devices=data), micro=micro, accumulation=accumulation,
        sequence=sequence,
        precision="bfloat16",
        offload=HOST_OFFLOAD if phases else None,
        phases=tuple((first, end) for first, end in phases) if phases else None,
        data=data,
        expert=expert,
        sharding=tuple(sharding),
    )  # fmt: skip
    program = lower(plan, graph)[0]
    batch = micro * accumulation * data
    context = RankContext(
        plan=plan,
        stack=build_layer_stack(model, dials or {}, device="meta", seed=1),
        program=program,
        settings=TrainSettings(steps=steps, batch=batch, sequence=sequence),
        checkpoints=folder / "checkpoints",
        device=device,
        graph=graph if data > 1 else None,
    )
    accelerator = device.accelerator
    with accelerator, FusedAttention():
        optimizer = Optimizer(context.settings, device, plan.moments)
        groups = _groups(plan, graph, device) if data > 1 else None
        queue = WaitingQueue(device, blocks=False) if plan.offloads else None
        store = ParamStore(context, optimizer, groups, queue, before_update=_nothing)
        store.initialize(None)
        compute = ComputeHandlers(
            context,
            store,
            layer_templates(
                context.stack, compiled=False, experts=groups.experts if groups else None
            ),
            optimizer=optimizer,
            batches=_batches(folder, batch, sequence),
            stop=lambda: False,
            dist=groups or SingleProcess(),
        )
        handlers = {
            kind: _labelled(kind, handler, accelerator)
            for kind, handler in compute.handlers().items()
        }
        interpreter = Interpreter(program, handlers, timer_for(device, len(program.instructions)))
        for step in range(1, steps + 1):
            before, accelerator.trace = accelerator.trace, []
            accelerator.counts.clear()
            compute.begin_step(step)
            interpreter.run()
        if queue is not None:
            queue.close()
        compute.close()
        store.close()
    pairs = zip(before, accelerator.trace, strict=True)
    return {
        "instructions": {
            label: {"launches": dict(count.launches), "waits": dict(count.waits)}
            for label, count in accelerator.counts.items()
        },
        "changes": sorted({one[0] for one, two in pairs if one != two}),
    }


class WaitingQueue(TransferQueue):
    """A queue that waits for each transfer, as FakeTensors do not know threads."""

    def submit(self, transfer: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        """Runs a transfer."""
        handle = super().submit(transfer, *uses)
        handle.synchronize()
        return handle


def _groups(plan: Plan, graph: Graph, device: Device) -> ProcessGroups:
    """The first rank's groups, of a backend that sends nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.parallel.devices)
    return ProcessGroups(plan, graph, 0, device)


def _nothing(layer: int) -> None:
    """Waits for nobody: nothing is saved."""


def _labelled(kind: str, handler: Handler, accelerator: FakeAccelerator) -> Handler:
    def call(layer: int, micro: int) -> None:
        accelerator.label = f"{kind} {layer} {micro}"
        handler(layer, micro)

    return call


def _batches(folder: Path, batch: int, sequence: int) -> Batches:
    text = " ".join(f"word{number % 23}" for number in range(batch * sequence))
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text(text)
    data = DataRequest(source=str(folder), tokenizer="byte", held_out=0.3)
    dataset = prepare_dataset(data, cache=folder / "cache")
    return Batches(dataset, sequence=sequence, batch=batch, seed=1)


if __name__ == "__main__":
    main()
