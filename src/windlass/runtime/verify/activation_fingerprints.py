"""Activation fingerprints: every layer's outputs and input gradients in two numbers per sample.

Two runs of one model on the same samples have the same fingerprints under any plan: those of the
parts that tensor-parallel ranks hold of a sample add up. So the first fingerprint that differs
tells in which layer two runs diverged, on which sample, and in which pass.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from windlass.models import (
    ContextParallelRank,
    EqualShard,
    TensorParallelRank,
    count_in_runs,
)
from windlass.program import InstructionKind
from windlass.runtime.interpreter import Handler, Handlers
from windlass.runtime.verify.handler_hooks import HookContext

FINGERPRINT_FOLDER = "fingerprints"
"""Folder of the fingerprints inside a run's folder."""

_TOKEN_TURN, _FEATURE_TURN = 0.9, 1.3
"""Angle in radians between the projection weights of neighbouring values. No multiple of either is
a full turn, so that the projection changes if values are swapped."""

PassDirection = Literal["forward", "backward"]


class FingerprintKey(NamedTuple):
    """The tensor that a fingerprint was taken of."""

    step: int
    direction: PassDirection
    layer: int
    """The layer whose output it is; backward, the layer whose input gradient it is."""
    sample: int
    """Index of the sample in the global batch."""


class Fingerprint(NamedTuple):
    """A tensor reduced to two numbers."""

    projection: float
    """Projection onto a fixed direction."""
    square: float
    """Square of the 2-norm."""

    def relative_error(self, other: "Fingerprint") -> float:
        """The difference from another fingerprint, relative to the other's norm."""
        norm = math.sqrt(other.square)
        error = max(abs(self.projection - other.projection), abs(math.sqrt(self.square) - norm))
        return error / norm if norm else error


class ActivationFingerprints:
    """Takes the fingerprints of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / FINGERPRINT_FOLDER / f"{rank}.json"
        self._file.parent.mkdir(exist_ok=True)
        self._pending: list[tuple[FingerprintKey, Fingerprint]] = []

    def wrap(self, handlers: Handlers, hook: HookContext) -> Handlers:
        """The same handlers, each followed by a fingerprint of what it computed."""
        compute = hook.compute
        tp_rank = hook.groups.tensor_parallel if hook.groups else TensorParallelRank(degree=1)
        context = hook.groups.context if hook.groups else ContextParallelRank()

        def take(direction: PassDirection, layer: int, micro: int, values: Tensor) -> None:
            first = compute.inputs.micro_batch_start(micro)
            for row, value in enumerate(values):
                key = FingerprintKey(compute.inputs.step, direction, layer, first + row)
                self._pending.append((key, _fingerprint(value, tp_rank, context)))

        def forward(layer: int, micro: int) -> None:
            handlers["forward"](layer, micro)
            output = compute.state.outputs.get((layer, micro))
            if output is not None:
                take("forward", layer, micro, output)

        def backward_of(kind: InstructionKind) -> Handler:
            def backward(layer: int, micro: int) -> None:
                handlers[kind](layer, micro)
                input_gradient = compute.state.gradients.get((layer - 1, micro))
                if input_gradient is not None:
                    take("backward", layer, micro, input_gradient)

            return backward

        def sync(layer: int, micro: int) -> None:
            handlers["sync"](layer, micro)
            self._write()

        wrapped: dict[InstructionKind, Handler] = {"forward": forward, "sync": sync}
        kinds: tuple[InstructionKind, ...] = ("backward", "backward_input")
        return {**handlers, **wrapped, **{kind: backward_of(kind) for kind in kinds}}

    def _write(self) -> None:
        with self._file.open("a") as file:
            for key, fingerprint in self._pending:
                file.write(json.dumps((*key, *fingerprint)) + "\n")
        self._pending.clear()


def read_fingerprints(folder: Path) -> Mapping[FingerprintKey, Fingerprint]:
    """All fingerprints of a run, summed over the ranks that have parts of a sample."""
    fingerprints: dict[FingerprintKey, Fingerprint] = {}
    for path in sorted((folder / FINGERPRINT_FOLDER).glob("*.json")):
        for line in path.read_text().splitlines():
            *fields, projection, square = json.loads(line)
            key = FingerprintKey(*fields)
            total = fingerprints.get(key, Fingerprint(0.0, 0.0))
            fingerprints[key] = Fingerprint(total.projection + projection, total.square + square)
    return fingerprints


def _fingerprint(
    value: Tensor, tp_rank: TensorParallelRank, context: ContextParallelRank
) -> Fingerprint:
    """The fingerprint of a rank's part `[s/r d/c]` of one sample, r rows by c columns of ranks.

    The rows share the tokens, which of a context-parallel rank are two runs of the sample.
    """
    wide = value.detach().double()
    # The pixels of a channel stand where a token has features.
    wide = wide[None] if wide.ndim == 1 else wide.flatten(1)
    count, width = wide.shape
    firsts = context.first_positions(count, EqualShard(tp_rank.row, tp_rank.rows))
    tokens = _cosines(_TOKEN_TURN, count, firsts, wide.device)
    features = _cosines(_FEATURE_TURN, width, (tp_rank.column * width,), wide.device)
    return Fingerprint(float(tokens @ (wide @ features)), float(wide.square().sum()))


def _cosines(turn: float, count: int, firsts: tuple[int, ...], device: torch.device) -> Tensor:
    """`Float64[count]`: cosines of `turn` times the indices in runs from each of `firsts` on."""
    return torch.cos(turn * count_in_runs(count, firsts, device, dtype=torch.float64))
