"""BackwardReach: how far a rank's backward passes go, as its program says."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from windlass.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReach:
    """Which layers of a rank have a backward pass, and what their last passes free."""

    forward_only: frozenset[int]
    """The layers before the first trained one: they save nothing, and their input is freed."""
    recomputed: frozenset[int]
    """The layers whose forward pass runs again right before their backward pass."""
    first_trained: int | None
    """The first trained layer, whose input has no gradient; None if it is on another rank."""
    frees_tokens: int | None
    """The layer whose last pass is the last to need a micro-batch's tokens; None if none does."""

    @classmethod
    def of(cls, program: Program, last_layer: int) -> Self:
        """The reach of a program."""
        passes: dict[str, set[int]] = defaultdict(set)
        for kind, layer, _ in program.instructions:
            if layer is not None:
                passes[kind].add(layer)
        forward, backward = passes["forward"], passes["backward"] | passes["backward_weight"]
        first = min(backward, default=None)
        if first is not None and first - 1 in passes["send"]:
            first = None
        takes_tokens = forward & {0, last_layer}
        return cls(
            forward_only=frozenset(forward - backward),
            recomputed=frozenset(passes["recompute"]),
            first_trained=first,
            frees_tokens=min(takes_tokens & backward or takes_tokens, default=None),
        )
