"""Notes: what each layer of a run puts out and passes down, in two numbers for each sample.

Two runs of one model on the same samples have the same notes, however they were cut: parts of a
sample that lie on several slices add up. So the first note that differs tells which layer first
went another way than the other run's, on which sample, and in which pass.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.program.instruction import InstructionKind
from windlass.runtime.handler import Handler
from windlass.runtime.verify.handler_hooks import HookContext
from windlass.runtime.handler import Handlers

FINGERPRINT_FOLDER = "notes"
"""In the folder of a run that is noted."""

_TOKEN_TURN, _FEATURE_TURN = 0.9, 1.3
"""Radians by which a value's weight in the projection turns from one to the next: of no simple
ratio with a circle, so that values that change places change the projection."""

PassDirection = Literal["forward", "backward"]


class FingerprintKey(NamedTuple):
    """What a note is of."""

    step: int
    direction: PassDirection
    layer: int
    """Whose output it is; backward, whose input the gradient is of."""
    sample: int
    """In the global batch."""


class Fingerprint(NamedTuple):
    """A tensor in two numbers."""

    projection: float
    """On a direction that is always the same."""
    square: float
    """Of its 2-norm."""

    def relative_error(self, other: "Fingerprint") -> float:
        """How far it is from another, over the other's norm."""
        norm = math.sqrt(other.square)
        most = max(
            abs(self.projection - other.projection), abs(math.sqrt(self.square) - norm)
        )  # fmt: skip
        return most / norm if norm else most


class ActivationFingerprints:
    """Takes notes of one device.

    Args:
        folder: of the run.
        device: which of its devices this is.
    """

    def __init__(self, folder: Path, device: int) -> None:
        self._file = folder / FINGERPRINT_FOLDER / f"{device}.json"
        self._file.parent.mkdir(exist_ok=True)
        self._taken: list[tuple[FingerprintKey, Fingerprint]] = []

    def wrap(self, handlers: Handlers, inside: HookContext) -> Handlers:
        """The same handlers, after each of which what it made is noted."""
        compute = inside.compute
        place = inside.pod.tensor_parallel if inside.pod else TensorParallelRank(degree=1)

        def take(way: PassDirection, layer: int, micro: int, values: Tensor) -> None:
            first = compute.micro_batch_start(micro)
            for row, value in enumerate(values):
                at = FingerprintKey(compute.step, way, layer, first + row)
                self._taken.append((at, _note(value, place)))

        def forward(layer: int, micro: int) -> None:
            handlers["forward"](layer, micro)
            made = compute.state.outputs.get((layer, micro))
            if made is not None:
                take("forward", layer, micro, made)

        def passed(kind: InstructionKind) -> Handler:
            def backward(layer: int, micro: int) -> None:
                handlers[kind](layer, micro)
                down = compute.state.gradients.get((layer - 1, micro))
                if down is not None:
                    take("backward", layer, micro, down)

            return backward

        def sync(layer: int, micro: int) -> None:
            handlers["sync"](layer, micro)
            self._write()

        noted: dict[InstructionKind, Handler] = {"forward": forward, "sync": sync}
        kinds: tuple[InstructionKind, ...] = ("backward", "backward_input")
        return {**handlers, **noted, **{kind: passed(kind) for kind in kinds}}

    def _write(self) -> None:
        with self._file.open("a") as file:
            for at, note in self._taken:
                file.write(json.dumps((*at, *note)) + "\n")
        self._taken.clear()


def read_fingerprints(folder: Path) -> Mapping[FingerprintKey, Fingerprint]:
    """All notes of a run, those of slices added up."""
    found: dict[FingerprintKey, Fingerprint] = {}
    for path in sorted((folder / FINGERPRINT_FOLDER).glob("*.json")):
        for line in path.read_text().splitlines():
            *place, projection, square = json.loads(line)
            at = FingerprintKey(*place)
            known = found.get(at, Fingerprint(0.0, 0.0))
            found[at] = Fingerprint(known.projection + projection, known.square + square)
    return found


def _note(value: Tensor, place: TensorParallelRank) -> Fingerprint:
    """Of a slice's own part of one sample, `[s/r d/c]`."""
    wide = value.detach().double()
    count, width = wide.shape
    tokens = _turning(_TOKEN_TURN, place.row * count, count, wide.device)
    features = _turning(_FEATURE_TURN, place.column * width, width, wide.device)
    return Fingerprint(float(tokens @ (wide @ features)), float(wide.square().sum()))


def _turning(turn: float, first: int, count: int, device: torch.device) -> Tensor:
    at = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return torch.cos(turn * at)
