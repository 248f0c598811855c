"""What a run measures now and then beside its steps: its held-out loss, and scores of tasks."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from windlass.data import TrainingBatches
from windlass.runtime.inference.held_out_loss import HeldOutLoss, evaluate, with_averages
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.inference.score_tasks import likelihoods_on_ranks
from windlass.runtime.optimizer_state.optimizer_state import Averaging
from windlass.schema import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured after one step."""

    loss: float | None = None
    """Held-out loss in nats per token; None if it was not due."""
    bits_per_byte: float | None = None
    accuracy: float | None = None
    """Share of held-out examples, or pairs of sentences, whose class is predicted right; None
    without classes."""
    sentence_loss: float | None = None
    """Part of the loss that is of pairs of sentences; None without a sentence head."""
    loss_ema: float | None = None
    """The loss of averaged weights; None if the run keeps none."""
    task_scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Metrics by `TASK.METRIC`; empty if tasks were not due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The evaluations of one rank of a run."""

    passes: RankPasses
    batches: TrainingBatches
    averaging: Averaging | None
    """What the run averages; None if nothing."""
    no_grad_layers: frozenset[int]
    """Layers whose forward pass runs without autograd in training."""

    def is_due(self, step: int) -> bool:
        """Whether anything is measured after a step."""
        return self._loss_is_due(step) or self._tasks_are_due(step)

    def after(self, step: int) -> Evaluation:
        """Measures what is due after a step, on all ranks together."""
        held_out = averaged = None
        if self._loss_is_due(step):
            held_out, averaged = with_averages(self.passes.store, self.averaging, self._held_out)
        return Evaluation(
            loss=held_out.loss if held_out else None,
            bits_per_byte=held_out.bits_per_byte if held_out else None,
            accuracy=held_out.accuracy if held_out else None,
            sentence_loss=held_out.sentence_loss if held_out else None,
            loss_ema=averaged.loss if averaged else None,
            task_scores=self._task_scores() if self._tasks_are_due(step) else {},
        )

    def _held_out(self) -> HeldOutLoss:
        return evaluate(self.passes, self.batches, no_grad_layers=self.no_grad_layers)

    def _task_scores(self) -> Mapping[str, float]:
        """The scores of the weights that the run trains; averages count where they are trained."""
        averaging, store = self.averaging, self.passes.store
        trains_averages = averaging is not None and not averaging.is_kept
        with store.averaged(averaging) if averaging and trains_averages else nullcontext():
            tasks = self.passes.context.tasks
            return (
                {} if tasks is None else tasks.metrics(partial(likelihoods_on_ranks, self.passes))
            )

    def _loss_is_due(self, step: int) -> bool:
        settings = self._settings
        return settings.evaluate_sequences > 0 and self._is_due(step, settings.evaluate_every)

    def _tasks_are_due(self, step: int) -> bool:
        every = self._settings.evaluate_tasks_every or self._settings.evaluate_every
        return self.passes.context.tasks is not None and self._is_due(step, every)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._settings.steps or step % every == 0

    @property
    def _settings(self) -> TrainSettings:
        return self.passes.context.settings
