"""StepOutcome: loss and gradient norm of a step over all ranks, and whether it updates weights."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from windlass.data import TrainingBatches
from windlass.errors import RunBroken
from windlass.runtime.distributed.process_groups import DistContext
from windlass.runtime.expert_load import ExpertLoad
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.parameters import ModelParameter
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step.step_inputs import StepInputs
from windlass.runtime.step.step_state import LossScale, StepState, stacked


class StepOutcome:
    """What comes of the passes of a step, the same on all ranks."""

    def __init__(
        self,
        context: RankContext,
        store: ParamStore,
        optimizer: Optimizer,
        *,
        inputs: StepInputs,
        batches: TrainingBatches,
        experts: ExpertLoad,
        stop: Callable[[], bool],
        dist: DistContext,
    ) -> None:
        plan, instructions = context.plan, context.program.instructions
        self._store, self._optimizer, self._inputs = store, optimizer, inputs
        self._experts, self._stop, self._dist = experts, stop, dist
        self._broken = BrokenStep(inputs, batches, plan.batch.micro, context.device.torch_device)
        self._clips = any(instruction.kind == "grad_norm" for instruction in instructions)
        scales = plan.precision == "float16"
        self.loss_scale = LossScale.of(context.settings.loss_scale) if scales else None
        """What losses are multiplied by in the backward passes; None in other precisions."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the outcome of the step before."""
        self._norm: float | None = None
        self._loss = math.nan
        self._clip_divisor: Tensor | None = None
        self._has_decided = False
        self.should_stop = False
        """Whether any rank asked to stop, known to all ranks at the end of the step."""

    def resume_loss_scale(self, saved: LossScale | None) -> None:
        """Goes on with a saved loss scale, unless the request fixes another or none is used."""
        if self.loss_scale is not None and saved is not None:
            self.loss_scale = self.loss_scale.resumed(saved)

    @property
    def scale(self) -> float:
        """Factor of the losses in the backward passes."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the step on all ranks, in nats per token."""
        return self._loss

    @property
    def gradient_norm(self) -> float:
        """2-norm over all gradients of the step, before clipping; NaN for a skipped step."""
        return math.nan if self._norm is None else self._norm

    def measure(self, state: StepState) -> None:
        """Sums loss and norm of the step on this rank, which `decide` reads, if it clips."""
        if self._clips:
            norm = self._optimizer.combine_norms(self._gradient_norms())
            state.measured = state.totals([norm], self._inputs.wide_weights)

    def decide(self, state: StepState) -> bool:
        """Whether the step updates weights, once all its passes are submitted.

        It waits for the device once a step: a broken gradient must not change any weight.

        Raises:
            RunBroken: a loss or gradient is not finite.
        """
        self._has_decided = True
        if state.measured is None:
            self._broken.require_finite_losses(state.losses)
            return True
        self._reduce(state, state.measured)
        overflowed = not math.isfinite(self.gradient_norm)
        if overflowed:
            self._skip_update(len(state.losses))
        self._clip_divisor = self._optimizer.numbers.clip_divisor(
            0.0 if overflowed else self.gradient_norm, scale=self.scale
        )
        self._store.finish_backward(self._clip_divisor)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after_step(overflowed=overflowed)
        return not overflowed

    def update(self, state: StepState, layer: int) -> None:
        """Updates the weights of a layer.

        Raises:
            RunBroken: a loss of a step that does not clip is not finite.
        """
        if not self._clips:
            if not self._has_decided:
                self.decide(state)
            weights = self._store.grads_for_norm(layer)
            state.norms.append(self._optimizer.gradient_norm(weights))
        self._store.update(layer, self._inputs.step, self._clip_divisor)

    def sync(self, state: StepState) -> None:
        """Reduces loss and norm over all ranks, unless `decide` has done so."""
        if self._norm is None:
            self._reduce(state, state.totals(state.norms, self._inputs.wide_weights))

    def _skip_update(self, micro_batches: int) -> None:
        """Drops the gradients of a step that overflowed by its loss scale, as all ranks do."""
        if self.loss_scale is None:
            layers = range(len(self._store.layers))
            weights = [weight for i in layers for weight in self._store.grads_for_norm(i)]
            raise self._broken.gradient_error(weights, self._optimizer, micro_batches)
        scale = self.loss_scale
        if scale.is_fixed or scale.scale <= 1:
            way_out = "lower it or leave it out" if scale.is_fixed else "train in bfloat16"
            raise RunBroken(
                f"gradients overflow float16 at step {self._inputs.step} with `train.loss_scale` = "
                f"{scale.scale:g}; {way_out}"
            )
        self._norm = math.nan
        self._store.drop_gradients()

    def _gradient_norms(self) -> list[Tensor]:
        """2-norms of parts of all gradients that this rank updates, layer by layer."""
        offloaded = self._store.offloaded_grad_norms
        layers = [
            () if layer in offloaded else self._store.grads_for_norm(layer)
            for layer in range(len(self._store.layers))
        ]
        norms = self._optimizer.gradient_norms_by_layer(layers)
        return [norm for layer, own in enumerate(norms) for norm in offloaded.get(layer, own)]

    def _reduce(self, state: StepState, totals: Tensor) -> None:
        """Sums loss, norm and requests to stop over all ranks."""
        norm, self._loss, self.should_stop = reduce_outcome(
            totals, state.losses, self._broken, self._experts, self._dist,
            stop=self._dist.world_size > 1 and self._stop(),
            is_first_copy=self._store.counts_in_norm,
        )  # fmt: skip
        self._norm = norm / self.scale


def reduce_outcome(
    totals: Tensor,
    losses: Mapping[int, Tensor],
    broken: "BrokenStep",
    experts: ExpertLoad,
    ranks: DistContext,
    *,
    stop: bool,
    is_first_copy: bool = True,
) -> tuple[float, float, bool]:
    """Gradient norm and loss over all ranks, and whether any asks to stop.

    The host waits for the device, and for all other ranks, at once.

    Args:
        totals: those of a step on this rank; see `StepState`.
        experts: their load is summed, too.
        is_first_copy: whether its gradients count: another rank may have the same.

    Raises:
        RunBroken: a loss of this rank is not finite.
    """
    square, loss, all_finite, *counts = experts.beside(totals).cpu().tolist()
    if not all_finite:
        broken.require_finite_losses(losses)
    # All tensor-parallel ranks have the same loss.
    own_loss = 0.0 if ranks.coord.tensor_rank else loss
    local = (square if is_first_copy else 0.0, own_loss, float(stop), *counts)
    total, whole_loss, stops, *loads = ranks.all_reduce_sum(local)
    experts.end_step(loads)
    return math.sqrt(total), whole_loss, stops > 0


_NAMED_DOCUMENTS = 8
"""Most documents that the message about a broken step names."""


class BrokenStep:
    """Names what is not finite in a step, for its error."""

    def __init__(
        self, inputs: StepInputs, batches: TrainingBatches, micro: int, device: torch.device
    ) -> None:
        self._inputs, self._batches = inputs, batches
        self._micro, self._device = micro, device

    def require_finite_losses(self, losses: Mapping[int, Tensor]) -> None:
        """Waits for the losses of a step, by micro-batch.

        Raises:
            RunBroken: one is not finite.
        """
        if not losses:  # the losses are those of another stage
            return
        parts = stacked(losses.values(), torch.float32, self._device)
        values = parts.reshape(len(parts), -1).sum(dim=1).cpu().tolist()
        for micro, loss in zip(losses, values, strict=True):
            if not math.isfinite(loss):
                first = self._inputs.micro_batch_start(micro)
                samples = range(first, first + self._micro)
                raise RunBroken(
                    f"the loss is {loss} at step {self._inputs.step}, micro-batch {micro}, over "
                    f"samples {first} to {first + self._micro - 1} from "
                    f"{self._documents(samples)}"
                )

    def gradient_error(
        self, weights: Iterable[ModelParameter], optimizer: Optimizer, micro_batches: int
    ) -> RunBroken:
        """The error of a step whose losses are finite and whose gradient norm is not."""
        names = [
            weight.name
            for weight in weights
            if not math.isfinite(float(optimizer.gradient_norm([weight])))
        ]
        step, first = self._inputs.step, self._inputs.first_sample
        samples = range(first, first + self._micro * micro_batches)
        return RunBroken(
            f"the gradient of `{names[0]}` and {len(names) - 1} others is not finite at step "
            f"{step}, although its losses are, over samples from {self._documents(samples)}"
            if names
            else f"the gradient norm overflows float32 at step {step}"
        )

    def _documents(self, samples: Iterable[int]) -> str:
        """Names of the documents that samples of this step contain."""
        by_sample = (self._batches.document_names(self._inputs.batch, each) for each in samples)
        names = list(dict.fromkeys(name for documents in by_sample for name in documents))
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED_DOCUMENTS])
        more = len(names) - _NAMED_DOCUMENTS
        return f"{shown} and {more} more" if more > 0 else shown
