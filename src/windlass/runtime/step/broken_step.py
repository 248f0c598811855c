"""What a step that cannot be trusted is: which loss, gradient and documents are to blame."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from windlass.data import TrainingBatches
from windlass.errors import RunBroken
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import ModelParameter
from windlass.runtime.step.step_inputs import StepInputs
from windlass.runtime.step.step_state import stacked

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
