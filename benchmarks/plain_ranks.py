"""Plain loops of torch's own parallel parts, as one writes them by hand; one step each.

Each trains the same layers as Windlass on tokens of the same shape, clips by the global norm, and
updates with fused AdamW. The tied embedding of a pipeline has a copy on its first and on its last
stage, whose gradients are not summed, so that the plain pipeline communicates less than ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from windlass.models.build import build_layer_stack
from windlass.models.loss import mean_cross_entropy

HEADS = 8
"""Heads of each attention, which up to 8 tensor-parallel ranks share equally."""
Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both sides train, and how it is parallelized."""

    name: str
    """A key of `PLAIN`."""
    model: str
    devices: int
    batch: int
    micro: int
    sequence: int
    compiled: bool

    @property
    def replicas(self) -> int:
        """How many ranks take samples of their own."""
        return self.devices if self.name in ("replicas", "shards") else 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.batch // self.replicas // self.micro


def plain_step(case: Case) -> Callable[[], None]:
    """A function that takes one step of the plain loop of a case, after `init_process_group`."""
    stack = build_layer_stack(case.model, {"dropout": 0.0, "heads": HEADS}, device="cpu", seed=0)
    layers = nn.Sequential(*stack.layers)
    batches = [
        tuple(torch.randint(stack.vocabulary, (2, case.micro, case.sequence)))
        for _ in range(case.micro_batches)
    ]
    return PLAIN[case.name](case, layers, batches)


def _compile(case: Case, layers: nn.Sequential) -> None:
    if case.compiled:
        for layer in layers[1:]:  # an embedding alone gains nothing
            layer.compile()


def _ddp(case: Case, layers: nn.Sequential, batches: Batches) -> Callable[[], None]:
    _compile(case, layers)
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)

    def passes() -> None:
        for index, (inputs, targets) in enumerate(batches):
            model.require_backward_grad_sync = index == len(batches) - 1
            (mean_cross_entropy(model(inputs), targets) / len(batches)).backward()

    return _step(layers, passes)


def _fsdp(case: Case, layers: nn.Sequential, batches: Batches) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (case.devices,))
    _compile(case, layers)
    fully_shard([layers[0], layers[-1]], mesh=mesh)  # their weights are tied
    for layer in layers[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    model: Any = layers  # `fully_shard` has changed its class

    def passes() -> None:
        for index, (inputs, targets) in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            (mean_cross_entropy(layers(inputs), targets) / len(batches)).backward()

    return _step(layers, passes)


def _dtensor(case: Case, layers: nn.Sequential, batches: Batches) -> Callable[[], None]:
    """Tensor and sequence parallelism by DTensor styles.

    Rows of the fused query, key and value are cut as they lie, so each rank computes as much as if
    whole heads had been cut, of other numbers.
    """
    mesh = init_device_mesh("cpu", (case.devices,))
    tokens, whole = Shard(1), Replicate()
    styles: dict[str, Any] = {
        "0.tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        f"{len(layers) - 1}.norm": SequenceParallel(),
        f"{len(layers) - 1}.projection": ColwiseParallel(
            input_layouts=tokens, output_layouts=whole
        ),
    }
    embedding: Any = layers[0]
    # Positions are added to this rank's tokens.
    embedding.forward = lambda ids: embedding.tokens(ids) + positions
    rank, rows = dist.get_rank(), case.sequence // case.devices
    positions = embedding.positions.weight.detach()[rank * rows : (rank + 1) * rows]
    for index in range(1, len(layers) - 1):
        attention: Any = layers[index].attention
        attention.query_width //= case.devices
        attention.kv_width //= case.devices
        styles |= {
            f"{index}.attention_norm": SequenceParallel(),
            f"{index}.attention": PrepareModuleInput(
                input_layouts=(tokens,), desired_input_layouts=(whole,)
            ),
            f"{index}.attention.input": ColwiseParallel(),
            f"{index}.attention.output": RowwiseParallel(output_layouts=tokens),
            f"{index}.hidden_norm": SequenceParallel(),
            f"{index}.hidden": PrepareModuleInput(
                input_layouts=(tokens,), desired_input_layouts=(whole,)
            ),
            f"{index}.hidden.input": ColwiseParallel(),
            f"{index}.hidden.output": RowwiseParallel(output_layouts=tokens),
        }
    parallelize_module(layers, mesh, styles)
    _compile(case, layers)

    def passes() -> None:
        for inputs, targets in batches:
            (mean_cross_entropy(layers(inputs), targets) / len(batches)).backward()

    return _step(layers, passes)


def _pipeline(case: Case, layers: nn.Sequential, batches: Batches) -> Callable[[], None]:
    from windlass.capture.capture_layers import capture_graph
    from windlass.models.layer_stack import layer_stack_from_module
    from windlass.planner.space.stage_partition import stage_partition

    rank, last = dist.get_rank(), case.devices - 1
    stack = layer_stack_from_module(
        layers, "bench", vocabulary=layers[0].tokens.num_embeddings, max_sequence=case.sequence
    )  # type: ignore[union-attr]
    first, end = stage_partition(capture_graph(stack), case.devices, case.sequence)[rank]
    _compile(case, layers)
    part = nn.Sequential(*list(layers)[first:end])
    schedule = Schedule1F1B(
        PipelineStage(part, rank, case.devices, torch.device("cpu")), len(batches),
        scale_grads=False,
        loss_fn=lambda logits, targets: mean_cross_entropy(logits, targets) / len(batches),
    )  # fmt: skip
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))

    def passes() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(**({"target": targets, "losses": []} if rank == last else {}))

    return _step(part, passes, summed=True)


def _step(
    layers: nn.Module, passes: Callable[[], None], *, summed: bool = False
) -> Callable[[], None]:
    """A step: passes, clipping, update.

    Args:
        layers: whose weights are updated.
        passes: leaves the gradients.
        summed: whether norms are summed over ranks by hand.
    """
    parameters = list(layers.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step() -> None:
        passes()
        if summed:
            present = [each.grad for each in parameters if each.grad is not None]
            squares = nn.utils.get_total_norm(present).square()
            dist.all_reduce(squares)
            torch._foreach_mul_(present, torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0))
        elif any(isinstance(each, DTensor) for each in parameters):
            _clip_by_kind(parameters)
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _clip_by_kind(parameters: Sequence[nn.Parameter]) -> None:
    """Clips plain and distributed gradients, which torch takes no norm of together."""
    norms = []
    for kind in (True, False):
        present = [p for p in parameters if p.grad is not None and isinstance(p, DTensor) == kind]
        norm = nn.utils.get_total_norm([p.grad for p in present])  # type: ignore[misc]
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for kind in (True, False):
        present = [p for p in parameters if p.grad is not None and isinstance(p, DTensor) == kind]
        nn.utils.clip_grads_with_norm_(present, 1.0, total)


PLAIN: dict[str, Callable[[Case, nn.Sequential, Batches], Callable[[], None]]] = {
    "replicas": _ddp, "shards": _fsdp, "tensor": _dtensor, "stages": _pipeline,
}  # fmt: skip
RIVALS = {"replicas": "DDP", "shards": "FSDP2", "tensor": "DTensor", "stages": "pipelining"}
