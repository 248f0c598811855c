"""StepGraph: the work of a step, recorded once and replayed, as CUDA graphs do.

There are two recordings. The passes of all micro-batches and the norm of their gradients are one;
the updates are the other, which shares its memory. Between the two the host reads loss and norm, as
it does in a step that is not recorded: so a broken or overflowed gradient changes no weight, and
the clip divisor is computed by the same numbers. One recording would have to do that on the device.

What a step takes from the host is copied to fixed addresses before its replay: the inputs
(`StepInputs`) and the numbers of its update (`StepNumbers`). Nothing else may differ from step to
step, which `program.step_graph_errors` sees to.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from windlass.errors import PlanError
from windlass.runtime.compute import ComputeHandlers
from windlass.runtime.interpreter import HandlerCall
from windlass.runtime.layer_templates import LayerTemplate
from windlass.runtime.memory_stats import is_out_of_memory
from windlass.runtime.parameters import ModelParameter
from windlass.runtime.rank_context import RankContext
from windlass.torch_ext import Event, RecordedWork

_WARM_UP_STEPS = 2
"""Steps with an update that run unrecorded first: they compile layers, load kernels and allocate
what lasts."""

PASSES, UPDATES = "recorded passes", "recorded updates"
"""What a step's measured times are of, in place of kinds of instructions."""


class StepGraph:
    """Runs steps of a rank that has no others.

    Raises:
        PlanError: the device records no work.
    """

    def __init__(
        self,
        context: RankContext,
        compute: ComputeHandlers,
        templates: Sequence[LayerTemplate],
        *,
        before_update: Callable[[int], None],
    ) -> None:
        if not context.device.can_record:
            raise PlanError(
                f"`step_graph` = true, but torch records no work of `{context.device.kind}`; leave "
                "it out"
            )
        self._device, self._compute, self._templates = context.device, compute, templates
        self._before_update = before_update
        self._layers = compute.layers
        handlers = compute.handlers()
        calls = [
            (kind, (handlers[kind], layer or 0, micro or 0))
            for kind, layer, micro in context.program.instructions
        ]
        self._passes = [call for kind, call in calls if kind not in _AFTER_PASSES]
        self._updates = [call for kind, call in calls if kind == "update"]
        self._sync = next(call for kind, call in calls if kind == "sync")
        self._warm_steps = 0
        self._recorded_passes: _RecordedPasses | None = None
        self._recorded_updates: RecordedWork | None = None
        self._events = [context.device.new_event(timing=True) for _ in range(4)]
        compute.fix_addresses()

    @property
    def is_warm(self) -> bool:
        """Whether enough steps ran unrecorded."""
        return self._warm_steps >= _WARM_UP_STEPS

    def note_step(self) -> None:
        """Counts a step that has run, if it updated the weights."""
        self._warm_steps += not math.isnan(self._compute.outcome.gradient_norm)

    def run(self) -> None:
        """Runs the step that `compute` has begun, and waits for the device.

        Raises:
            PlanError: its work cannot be recorded.
        """
        compute = self._compute
        compute.load_all()
        self._mark(0)
        self._run_passes()
        self._mark(1)
        updates = compute.outcome.decide(compute.state)
        self._mark(2)
        if updates:
            self._run_updates()
        self._mark(3)
        _call([self._sync])
        self._device.current_stream().synchronize()

    def _run_passes(self) -> None:
        recorded = self._recorded_passes
        if recorded is None:
            self._require_keyed_draws()
            work = self._record(self._compute_passes, beside=None)
            weights = [weight for layer in self._layers for weight in layer.owned]
            recorded = self._recorded_passes = _RecordedPasses(work, self._compute, weights)
        recorded.replay()

    def _compute_passes(self) -> None:
        _call(self._passes)
        self._compute.outcome.measure(self._compute.state)

    def _run_updates(self) -> None:
        for _, layer, _ in self._updates:
            self._before_update(layer)
        if self._recorded_updates is None and self._recorded_passes is not None:
            self._recorded_updates = self._record(
                lambda: _call(self._updates), beside=self._recorded_passes.work
            )
        if self._recorded_updates is not None:
            self._recorded_updates.replay()

    def _record(self, work: Callable[[], None], *, beside: RecordedWork | None) -> RecordedWork:
        try:
            return self._device.record(work, beside=beside)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            first_line = str(error).partition("\n")[0]
            raise PlanError(
                f"the step cannot be recorded: {first_line}; set `step_graph` = false"
            ) from error

    def _require_keyed_draws(self) -> None:
        """Refuses layers whose random numbers depend on a seed that the host sets at each call."""
        drawing = [i for i, template in enumerate(self._templates) if template.draws_unkeyed]
        if drawing:
            raise PlanError(
                f"`step_graph` = true, but layer {drawing[0]} draws random numbers other than "
                "`nn.Dropout`, seeded anew at each step; set `step_graph` = false"
            )

    def _mark(self, index: int) -> None:
        self._events[index].record(self._device.current_stream())

    def step_seconds(self) -> float:
        """Seconds of the last step on the device."""
        return _seconds(self._events[0], self._events[3])

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds of the last step's passes and of its updates."""
        begin, passed, decided, end = self._events
        return {PASSES: _seconds(begin, passed), UPDATES: _seconds(decided, end)}


_AFTER_PASSES = ("grad_norm", "update", "sync")


class _RecordedPasses:
    """Recorded passes, with the tensors in which each replay leaves its results."""

    def __init__(
        self, work: RecordedWork, compute: ComputeHandlers, weights: Sequence[ModelParameter]
    ) -> None:
        self.work, self._compute, self._state = work, compute, compute.state
        # Held for good: updates may be recorded in a later step, and must not use their memory.
        self._gradients: list[tuple[ModelParameter, Tensor | None, Tensor | None]] = [
            (weight, weight.gradient, weight.sparse_gradient) for weight in weights
        ]

    def replay(self) -> None:
        """Runs the passes; state and gradients are then where an unrecorded step has them."""
        self.work.replay()
        self._compute.state = self._state
        for weight, gradient, sparse in self._gradients:
            weight.gradient, weight.sparse_gradient = gradient, sparse


def _call(calls: Sequence[HandlerCall]) -> None:
    for handler, layer, micro in calls:
        handler(layer, micro)


def _seconds(begin: Event, end: Event) -> float:
    return begin.elapsed_time(end) * 1e-3
