"""The passes of a step: micro-batch after micro-batch, or by a schedule of torch's pipelining."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from windlass.engines.torch.mesh import MeshRank
from windlass.engines.torch.stage import Chunk
from windlass.program import chunks_of_stage
from windlass.runtime import DTYPES, LayerTemplate, RankContext, batch_on_meta, output_shapes


class Passes(Protocol):
    """Runs the forward and backward passes of all micro-batches of a step."""

    def run(self, weights: Tensor) -> None:
        """Runs them, and leaves the sums of gradients in the weights.

        Args:
            weights: weight of each loss in the gradient, `Float[micro_batch ...]`.
        """


class OneStage:
    """Micro-batch after micro-batch through all layers.

    Args:
        chunk: all layers of the model.
        micro_batches: micro-batches of a step.
        reshard: whether weights are gathered for each pass, or once a step.
    """

    def __init__(self, chunk: Chunk, micro_batches: int, *, reshard: bool) -> None:
        self._chunk, self._micro_batches, self._reshard = chunk, micro_batches, reshard
        self._nothing = torch.empty(0)

    def run(self, weights: Tensor) -> None:
        """Runs them, and leaves the sums of gradients in the weights."""
        for micro in range(self._micro_batches):
            is_last = micro == self._micro_batches - 1
            if isinstance(self._chunk, FSDPModule):
                self._chunk.set_is_last_backward(is_last)
                self._chunk.set_requires_gradient_sync(is_last)
                self._chunk.set_reshard_after_backward(is_last or self._reshard)
            losses = self._chunk(self._nothing, micro=torch.tensor([micro]))
            _weighted(losses, weights[micro : micro + 1]).backward()


class PipelinedStages:
    """The chunks of one stage in torch's schedule."""

    def __init__(
        self,
        context: RankContext,
        ranks: MeshRank,
        chunks: Sequence[Chunk],
        templates: Sequence[LayerTemplate],
    ) -> None:
        plan = context.plan
        shapes = output_shapes(templates, batch_on_meta(context))
        self._micro_batches = plan.batch.accumulation
        numbers = chunks_of_stage(plan, ranks.coord.stage)
        last = len(plan.stages) - 1
        self._has_first, self._has_last = 0 in numbers, last in numbers

        def passed(layer: int) -> Tensor:
            """What a layer gives to the next stage, without memory."""
            dtype = DTYPES[plan.precision]
            return torch.empty(shapes[layer], dtype=dtype, device="meta", requires_grad=True)

        stages = [
            PipelineStage(
                chunk, number, len(plan.stages), context.device.torch_device,
                input_args=passed(plan.stages[number].first_layer - 1)
                if number else torch.empty(1, dtype=torch.int64, device="meta"),
                output_args=torch.empty(1, 1, device="meta", requires_grad=True)
                if number == last else passed(plan.stages[number].end_layer - 1),
                group=ranks.stage_group,
            )
            for number, chunk in zip(numbers, chunks, strict=True)
        ]  # fmt: skip
        self._schedule = _schedule(context, stages)

    def run(self, weights: Tensor) -> None:
        """Runs them, and leaves the sums of gradients in the weights."""
        numbers = torch.arange(self._micro_batches)
        self._schedule.step(
            *((numbers,) if self._has_first else ()),
            target=weights if self._has_last else None,
            return_outputs=False,
            micro=numbers,
        )


def _schedule(
    context: RankContext, stages: Sequence[PipelineStage]
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
    plan = context.plan
    count = plan.batch.accumulation
    if plan.parallel.schedule == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), count, loss_fn=_weighted, scale_grads=False)
    # torch's 1F1B asks for a micro-batch for each stage; with fewer it is the order of GPipe.
    fills = plan.parallel.schedule == "1f1b" and count >= plan.parallel.pipeline
    kind = Schedule1F1B if fills else ScheduleGPipe
    return kind(stages[0], count, loss_fn=_weighted, scale_grads=False)


def _weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """The loss whose gradient is asked for: losses by their share of all targets of the step.

    Args:
        losses: of a micro-batch, `Float[1 result]`.
        weights: `Float[1]` or `[1 result]`.
    """
    return (losses * weights.reshape(1, -1)).sum()
