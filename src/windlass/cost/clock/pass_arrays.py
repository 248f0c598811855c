"""Pass arrays: seconds of the passes of a batch of plans, with their recompute."""

from functools import cached_property

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.plan_batch import PlanBatch
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.clock.price_keys import PassWay
from windlass.program import InstructionKind


class PassArrays:
    """Seconds of passes of each layer, `[layer, plan]`.

    Args:
        columns: the same plans; their recompute counts.
    """

    def __init__(self, batch: PlanBatch, columns: PlanColumns) -> None:
        self._batch = batch
        full, selective = columns.recompute_modes()
        selects = bool(selective.any())

        def of(kind: InstructionKind) -> Floats:
            plain = batch.passes(PassWay(kind))
            if not selects:
                return plain
            return np.where(selective, batch.passes(PassWay(kind, selective=True)), plain)

        self.forward = of("forward")
        self.backward = of("backward_input" if batch.splits else "backward")
        """With the recompute before it; the input-gradient part if the backward is split."""
        if full.any():
            self.backward = self.backward + np.where(full, of("recompute"), 0.0)
        self.weight = of("backward_weight") if batch.splits else np.zeros_like(self.forward)
        """The weight-gradient part of a split backward; else zero."""

    @cached_property
    def durations(self) -> Floats:
        """Seconds of passes, `[row, plan]`, in the rows of `schedule_levels`."""
        by_chunk = self._batch.layout.by_chunk
        forward, backward, weight = map(by_chunk, (self.forward, self.backward, self.weight))
        first, later = map(by_chunk, self._batch.sums)
        none = np.zeros_like(forward)
        if self._batch.splits:
            rows = (forward, backward, weight + later, none, backward, weight + first)
        else:
            rows = (forward, backward + later, none, none, backward + first, none)
        return np.concatenate(rows)

    @cached_property
    def sending(self) -> Floats:
        """Seconds of the message that each pass sends, `[row, plan]`; as `durations`."""
        ahead, none = self._ahead
        back = self._shifted(self.returned)
        return np.concatenate((ahead, back, none, none, back, none))

    @cached_property
    def received(self) -> Floats:
        """Seconds of the message that each pass waits for, `[row, plan]`; as `durations`."""
        (ahead, none), back = self._ahead, self.returned
        return np.concatenate((self._shifted(ahead), back, none, none, back, none))

    @cached_property
    def returned(self) -> Floats:
        """Seconds of the gradient that each chunk gets from the next one, `[chunk, plan]`."""
        (ahead, _), forward_chunks = self._ahead, self._batch.layout.forward_chunks
        return np.where(np.arange(len(ahead))[:, None] >= forward_chunks, ahead, 0.0)

    @cached_property
    def _ahead(self) -> tuple[Floats, Floats]:
        """Seconds of messages to the next chunk; and of none, `[chunk, plan]`."""
        ahead, none = self._batch.messages.copy(), np.zeros_like(self._batch.messages)
        ahead[-1] = 0.0
        return ahead, none

    def _shifted(self, messages: Floats) -> Floats:
        """The same by the chunk behind each message, `[chunk, plan]`."""
        return np.concatenate((np.zeros_like(messages[:1]), messages[:-1]))
