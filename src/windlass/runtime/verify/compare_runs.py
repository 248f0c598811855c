"""Comparison of a run with the same steps on a single device, by what both left in their folders.

After one step from zero moments the first moment is a share of `g / divisor`, `1 - beta1` for Adam,
so the checkpoint after the first step contains every gradient `g`; all contain the weights.
Activations and input gradients are compared by their fingerprints.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import checkpoint_name, layer_file, open_checkpoint
from windlass.runtime.checkpoint.layer_tensors import LayerTensors, open_layer
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.runtime.verify.activation_fingerprints import (
    Fingerprint,
    FingerprintKey,
    read_fingerprints,
)
from windlass.runtime.verify.error_record import (
    ErrorRecord,
    least_scale,
    relative_error,
    tensor_error,
)
from windlass.schema import (
    CHECKPOINT_FOLDER,
    MOMENT_TOLERANCE,
    TOLERANCE,
    ComparedQuantity,
    MomentFormat,
    Precision,
    Step,
    TrainSettings,
    VerificationResult,
    optimizer_law,
)
from windlass.torch_ext import MomentCodec, StoredMoment

_MERGED_FOLDER = ".merged"
"""Folder in the run's folder for the merged checkpoint that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentedRun:
    """A run that took fingerprints, and saved a checkpoint after every step."""

    folder: Path
    steps: tuple[Step, ...]
    has_fingerprints: bool = True
    """Whether it took fingerprints of outputs and their gradients, as the own runtime does."""


def compare_to_single_device(
    run: InstrumentedRun,
    single_device: InstrumentedRun,
    stack: LayerStack,
    settings: TrainSettings,
    *,
    precision: Precision,
    moments: MomentFormat = "float32",
    exact: bool = False,
) -> VerificationResult:
    """Compares losses, norms, outputs, gradients and weights of two runs.

    Args:
        exact: whether everything must be equal bit for bit.

    Raises:
        CheckpointError: a checkpoint is damaged or belongs to another model.
    """
    tolerance = {
        quantity: 0.0 if exact else _tolerance(quantity, precision, moments)
        for quantity in get_args(ComparedQuantity)
    }
    comparison = _RunComparison(
        run, single_device, stack, settings, tolerance,
        # With fewer bits a rounding decides now and then which class or expert has most.
        counts_agree=exact or precision in ("float64", "float32"),
    )  # fmt: skip
    steps = zip(run.steps, single_device.steps, strict=True)
    for index, (actual, expected) in enumerate(steps):
        comparison.compare_step(actual, expected, first=index == 0)
    return comparison.result()


def checkpoint_layers(
    run: InstrumentedRun, stack: LayerStack, step: int
) -> tuple[dict[str, Tensor], ...]:
    """Weights, buffers and decoded first moments of each layer after a step, by checkpoint key.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
    """
    path = run.folder / CHECKPOINT_FOLDER / checkpoint_name(step)
    merged = merge_shards(open_checkpoint(path), stack, run.folder / _MERGED_FOLDER).path
    files = [merged / layer_file(index) for index in range(len(stack.layers))]
    return tuple(_read_tensors(file) if file.exists() else {} for file in files)


class _RunComparison:
    """Compares step by step; keeps the largest error of each quantity, and the first mismatch."""

    def __init__(
        self,
        run: InstrumentedRun,
        single_device: InstrumentedRun,
        stack: LayerStack,
        settings: TrainSettings,
        tolerance: Mapping[ComparedQuantity, float],
        *,
        counts_agree: bool,
    ) -> None:
        self._runs, self._counts_agree = (run, single_device), counts_agree
        self._stack, self._settings = stack, settings
        self._fingerprints = (
            read_fingerprints(run.folder), read_fingerprints(single_device.folder)
        )  # fmt: skip
        self._has_fingerprints = run.has_fingerprints
        self._errors = ErrorRecord(stack.names, tolerance)

    def result(self) -> VerificationResult:
        """The result over all steps compared so far."""
        return self._errors.result(len(self._runs[0].steps))

    def compare_step(self, actual: Step, expected: Step, *, first: bool) -> None:
        """Compares one step, each quantity in the order in which a step computes it."""
        step = expected.step
        actual_prints, expected_prints = (
            {key: value for key, value in prints.items() if key.step == step}
            for prints in self._fingerprints
        )
        if self._has_fingerprints:
            self._compare_samples(step, actual_prints, expected_prints)
        else:
            expected_prints = {}
        forward = [key for key in expected_prints if key.direction == "forward"]
        forward.sort(key=lambda key: (key.layer, key.sample))
        self._compare_fingerprints("output", forward, actual_prints, expected_prints)
        self._errors.add("loss", step, relative_error(actual.loss, expected.loss))
        backward = [key for key in expected_prints if key.direction == "backward"]
        backward.sort(key=lambda key: (-key.layer, key.sample))
        self._compare_fingerprints("input gradient", backward, actual_prints, expected_prints)
        layers = [checkpoint_layers(run, self._stack, step) for run in self._runs]
        if first and optimizer_law(self._settings.optimizer).first_moment(self._settings.betas):
            scales = [_clip_divisor(each, self._settings) for each in (actual, expected)]
            self._compare_tensors("weight gradient", "moment1", step, layers, scales)
        self._compare_outcome(actual, expected)
        self._compare_tensors("weight", "weight", step, layers, (1.0, 1.0))
        self._compare_tensors("buffer", "buffer", step, layers, (1.0, 1.0))
        self._compare_evaluation(actual, expected)

    def _compare_outcome(self, actual: Step, expected: Step) -> None:
        """Compares gradient norms, which are NaN where a step overflows, and loss scales."""
        step, norms = actual.step, (actual.gradient_norm, expected.gradient_norm)
        both_overflow = all(map(math.isnan, norms))
        self._errors.add("gradient norm", step, 0.0 if both_overflow else relative_error(*norms))
        if expected.loss_scale is not None:
            error = relative_error(actual.loss_scale, expected.loss_scale)
            self._errors.add("loss scale", step, error)
        if expected.expert_load and self._counts_agree:
            self._errors.add("expert load", step, 0.0 if same_load(actual, expected) else math.inf)

    def _compare_evaluation(self, actual: Step, expected: Step) -> None:
        pairs: tuple[tuple[ComparedQuantity, float | None, float | None], ...] = (
            ("held-out loss", actual.held_out_loss, expected.held_out_loss),
            ("averaged held-out loss", actual.held_out_loss_ema, expected.held_out_loss_ema),
            (
                "held-out bits per byte",
                actual.held_out_bits_per_byte,
                expected.held_out_bits_per_byte,
            ),
        )
        for quantity, value, other in pairs:
            if other is not None:
                self._errors.add(quantity, actual.step, relative_error(value, other))
            elif value is not None:
                self._errors.add("evaluations", actual.step, math.inf)
        if expected.held_out_accuracy is not None and self._counts_agree:
            right = actual.held_out_accuracy
            error = abs((math.nan if right is None else right) - expected.held_out_accuracy)
            self._errors.add("held-out accuracy", actual.step, error)

    def _compare_samples(
        self,
        step: int,
        actual: Mapping[FingerprintKey, Fingerprint],
        expected: Mapping[FingerprintKey, Fingerprint],
    ) -> None:
        """Checks that the same samples pass through all layers."""
        differing = actual.keys() ^ expected.keys()
        self._errors.add("samples", step, 0.0)
        for key in sorted(differing, key=lambda key: (key.direction, key.layer, key.sample)):
            self._errors.add("samples", step, math.inf, sample=key.sample)

    def _compare_fingerprints(
        self,
        quantity: ComparedQuantity,
        keys: Iterable[FingerprintKey],
        actual: Mapping[FingerprintKey, Fingerprint],
        expected: Mapping[FingerprintKey, Fingerprint],
    ) -> None:
        for key in keys:
            if key in actual:
                error = actual[key].relative_error(expected[key])
                self._errors.add(quantity, key.step, error, layer=key.layer, sample=key.sample)

    def _compare_tensors(
        self,
        quantity: ComparedQuantity,
        prefix: str,
        step: int,
        runs: Sequence[Sequence[Mapping[str, Tensor]]],
        scales: Sequence[float],
    ) -> None:
        """Compares all tensors whose checkpoint key begins with a prefix."""
        for layer, (actual, expected) in enumerate(zip(*runs, strict=True)):
            keys = [key for key in expected if key.startswith(f"{prefix}/")]
            min_scale = least_scale(expected[key] for key in keys)
            for key in keys:
                error = tensor_error(actual.get(key), expected[key], scales, min_scale)
                weight = key.removeprefix(f"{prefix}/")
                self._errors.add(quantity, step, error, layer=layer, weight=weight)


def same_load(actual: Step, expected: Step) -> bool:
    """Whether all experts took as many tokens in two steps, one of which another process told."""
    own, other = (
        {name: tuple(load) for name, load in step.expert_load.items()}
        for step in (actual, expected)
    )
    return own == other and actual.dropped_share == expected.dropped_share


def _tolerance(quantity: ComparedQuantity, precision: Precision, moments: MomentFormat) -> float:
    depends_on_moments = quantity in (
        "weight gradient", "weight", "buffer", "held-out loss", "averaged held-out loss",
        "held-out bits per byte",
    )  # fmt: skip
    return TOLERANCE[precision] + (MOMENT_TOLERANCE[moments] if depends_on_moments else 0.0)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Weights, buffers and decoded first moments of a layer's file, by key."""
    codec = MomentCodec(torch.device("cpu"))
    with open_layer(path) as layer:
        keys = [key for key in layer.keys if key.startswith(("weight/", "buffer/", "moment1/"))]
        tensors = {key: layer.read(key) for key in keys}
        for key in keys:
            name = key.removeprefix("moment1/")
            if name != key and tensors[key].dtype not in (torch.float32, torch.float64):
                moments = (_stored_moment(layer, 1, name), _stored_moment(layer, 2, name))
                tensors[key] = codec.decode_all(moments)[0]
    return tensors


def _stored_moment(layer: LayerTensors, which: int, name: str) -> StoredMoment:
    key = f"scale{which}/{name}"
    scales = layer.read(key) if key in layer.keys else None
    return StoredMoment(layer.read(f"moment{which}/{name}"), scales)


def _clip_divisor(step: Step, settings: TrainSettings) -> float:
    """The divisor that clipped the gradients of a step."""
    if settings.clip is None:
        return 1.0
    # In float32 as in the optimizer: its rounding would otherwise count as the gradient's.
    return float(torch.tensor(max(1.0, (step.gradient_norm + 1e-6) / settings.clip)))
