"""Agree: holds what a run left behind against what the same steps on one device left.

After one step of Adam from moments of zero the first moment is `(1 - beta1) g / divisor`, so that
the checkpoint after the first step holds every gradient `g`; those after all steps hold the
weights. What layers made on the way stands in the notes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from windlass.models.layer_stack import LayerStack
from windlass.runtime.checkpoint.checkpoint import checkpoint_name, open_checkpoint, layer_file
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.runtime.verify.activation_fingerprints import FingerprintKey, Fingerprint, read_fingerprints
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat
from windlass.schema.request import TrainRequest
from windlass.schema.run_record import CHECKPOINT_FOLDER, Step
from windlass.schema.verification import (
    MOMENT_TOLERANCE,
    TOLERANCE,
    QuantityComparison,
    Mismatch,
    VerificationResult,
    ComparedQuantity,
)
from windlass.torch_ext.quantized_moments import MomentCodec, StoredMoment

_JOINED = ".whole"
"""In the run's folder: the checkpoint that is read, with whole layers."""

_LEAST_SHARE = 0.01
"""Of the largest value in its layer that a tensor's own counts as at least. Where all is zero but
for rounding, as in the gradient of the keys' bias, which softmax cancels, it is of that size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentedRun:
    """A run that noted what its layers made, and saved after every step."""

    folder: Path
    steps: tuple[Step, ...]


def compare_to_single_device(
    run: InstrumentedRun,
    single_device: InstrumentedRun,
    stack: LayerStack,
    settings: TrainRequest,
    *,
    precision: Precision,
    moments: MomentFormat = "float32",
) -> VerificationResult:
    """Compares losses, norms, outputs, gradients and weights of two runs.

    Args:
        one: under the plan in question.
        other: on one device.
        chain: the model of both; its weights are not touched.
        settings: of both.
        precision: of both.
        moments: the format that both kept them in.

    Raises:
        CheckpointError: one of them is of another model, or damaged.
    """
    comparing = _Comparing(run, single_device, stack, settings, precision, moments)
    for step, (mine, its) in enumerate(zip(run.steps, single_device.steps, strict=True)):
        comparing.step(mine, its, first=step == 0)
    return comparing.proof()


class _Comparing:
    """Goes through all steps and keeps the largest error of each kind, and the first difference."""

    def __init__(
        self,
        one: InstrumentedRun,
        other: InstrumentedRun,
        chain: LayerStack,
        settings: TrainRequest,
        precision: Precision,
        moments: MomentFormat,
    ) -> None:
        self._one, self._other, self._chain, self._settings = one, other, chain, settings
        self._close = TOLERANCE[precision]
        self._moments = moments
        self._notes = (read_fingerprints(one.folder), read_fingerprints(other.folder))
        self._worst: dict[ComparedQuantity, tuple[int, float]] = {}
        self._first: Mismatch | None = None

    def proof(self) -> VerificationResult:
        """What was found."""
        return VerificationResult(
            steps=len(self._one.steps),
            comparisons=tuple(
                QuantityComparison(quantity=what, count=count, error=error, tolerance=self._tolerance(what))
                for what, (count, error) in self._worst.items()
            ),
            first_mismatch=self._first,
        )

    def step(self, mine: Step, its: Step, *, first: bool) -> None:
        """Compares one step, in the order in which it makes things."""
        at = its.step
        notes, wanted = ({p: n for p, n in run.items() if p.step == at} for run in self._notes)
        self._samples(at, notes, wanted)
        forward = [place for place in wanted if place.direction == "forward"]
        self._noted("output", sorted(forward, key=lambda p: (p.layer, p.sample)), notes, wanted)
        self._tell("loss", at, _apart(mine.loss, its.loss))
        back = [place for place in wanted if place.direction == "backward"]
        down = sorted(back, key=lambda p: (-p.layer, p.sample))
        self._noted("input gradient", down, notes, wanted)
        one, other = (self._checkpoint(run, at) for run in (self._one, self._other))
        if first:
            scales = [_divisor(step, self._settings) for step in (mine, its)]
            self._tensors("weight gradient", "moment1", at, one, other, scales)
        self._tell("gradient norm", at, _apart(mine.gradient_norm, its.gradient_norm))
        self._tensors("weight", "weight", at, one, other, (1.0, 1.0))

    def _samples(self, step: int, notes: Mapping[FingerprintKey, Fingerprint], wanted: Mapping[FingerprintKey, Fingerprint]) -> None:
        """Every sample passes through every layer, and no other does."""
        strays = sorted(notes.keys() ^ wanted.keys(), key=lambda p: (p.direction, p.layer, p.sample))
        self._tell("samples", step, 0.0)
        for place in strays:
            self._tell("samples", step, math.inf, sample=place.sample)

    def _noted(
        self,
        what: ComparedQuantity,
        places: Iterable[FingerprintKey],
        notes: Mapping[FingerprintKey, Fingerprint],
        wanted: Mapping[FingerprintKey, Fingerprint],
    ) -> None:
        for place in places:
            if place in notes:
                error = notes[place].relative_error(wanted[place])
                self._tell(what, place.step, error, layer=place.layer, sample=place.sample)

    def _checkpoint(self, run: InstrumentedRun, step: int) -> tuple[dict[str, Tensor], ...]:
        """The tensors of each layer after a step."""
        path = run.folder / CHECKPOINT_FOLDER / checkpoint_name(step)
        whole = merge_shards(open_checkpoint(path), self._chain, run.folder / _JOINED).path
        files = [whole / layer_file(index) for index in range(len(self._chain.layers))]
        return tuple(_tensors(file) if file.exists() else {} for file in files)

    def _tensors(
        self,
        what: ComparedQuantity,
        kind: str,
        step: int,
        one: Sequence[Mapping[str, Tensor]],
        other: Sequence[Mapping[str, Tensor]],
        scales: Sequence[float],
    ) -> None:
        for layer, (mine, its) in enumerate(zip(one, other, strict=True)):
            keys = [key for key in its if key.startswith(f"{kind}/")]
            most = max((_largest(its[key]) for key in keys), default=0.0)
            for key in keys:
                least = _LEAST_SHARE * most
                error = _distance(mine.get(key), its[key], scales, least)
                self._tell(what, step, error, layer=layer, weight=key.removeprefix(f"{kind}/"))

    def _tell(
        self,
        what: ComparedQuantity,
        step: int,
        error: float,
        *,
        layer: int | None = None,
        weight: str | None = None,
        sample: int | None = None,
    ) -> None:
        error = math.inf if math.isnan(error) else error
        count, worst = self._worst.get(what, (0, 0.0))
        self._worst[what] = (count + 1, max(worst, error))
        if self._first is None and error > self._tolerance(what):
            self._first = Mismatch(
                step=step, quantity=what, error=error, layer=layer, weight=weight, sample=sample,
                layer_name=None if layer is None else self._chain.names[layer],
            )  # fmt: skip

    def _tolerance(self, what: ComparedQuantity) -> float:
        kept = ("weight gradient", "weight")
        return self._close + (MOMENT_TOLERANCE[self._moments] if what in kept else 0.0)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Weights and first moments of a layer's file, decoded."""
    codec = MomentCodec(torch.device("cpu"))
    with safe_open(path, framework="pt") as file:
        names: list[str] = [n for n in file.keys() if n.startswith(("weight/", "moment1/"))]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
        for name in names:
            rest = name.removeprefix("moment1/")
            if rest != name and tensors[name].dtype not in (torch.float32, torch.float64):
                pair = [_kept(file, which, rest) for which in (1, 2)]
                tensors[name] = codec.decode_all((pair[0], pair[1]))[0]
    return tensors


def _kept(file: safe_open, which: int, name: str) -> StoredMoment:
    scale = f"scale{which}/{name}"
    scales = file.get_tensor(scale) if scale in file.keys() else None  # noqa: SIM118
    return StoredMoment(file.get_tensor(f"moment{which}/{name}"), scales)


def _distance(
    mine: Tensor | None, its: Tensor, scales: Sequence[float], least: float
) -> float:  # fmt: skip
    """The largest difference over the largest value; infinite if one is missing."""
    if mine is None or mine.shape != its.shape:
        return math.inf
    whole = max(_largest(its), least) * scales[1]
    apart = _largest(mine.double() * scales[0] - its.double() * scales[1])
    return apart / whole if whole else apart


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _divisor(step: Step, settings: TrainRequest) -> float:
    """What gradients of a step were divided by to keep their norm to the clip."""
    if settings.clip is None:
        return 1.0
    # As the optimizer has it, in float32: else its rounding would count as the gradient's.
    return float(torch.tensor(max(1.0, (step.gradient_norm + 1e-6) / settings.clip)))


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other) if other else abs(one)
