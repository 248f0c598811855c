"""A training loop as one would write it in plain PyTorch, to compare a run with.

It shares no data, loss, optimizer, schedule or dropout code with what runs a plan: the whole model
is one `nn.Sequential`, `optimizers` has its optimizer, and `data_order` makes the batches.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from windlass.runtime.verify.plain_loop.data_order import PlainBatches, finalized
from windlass.runtime.verify.plain_loop.examples import PlainExamples
from windlass.runtime.verify.plain_loop.float8 import use_plain_float8
from windlass.runtime.verify.plain_loop.losses import Counts, sums_of
from windlass.runtime.verify.plain_loop.optimizers import plain_optimizer
from windlass.runtime.verify.plain_loop.pairs import PAIR_PLACES, PlainPairs
from windlass.schema import TrainSettings

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MAX_CALLS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """What a run in plain PyTorch gave."""

    losses: tuple[float, ...]
    """Mean loss of each step in nats a token."""
    gradient_norms: tuple[float, ...]
    """Global gradient norm of each step, before clipping."""
    learning_rates: tuple[float, ...]
    held_out_loss: float | None
    """Loss on held-out text after the last step; None if no sequence is evaluated."""
    held_out_bits_per_byte: float | None
    held_out_loss_ema: float | None
    """Held-out loss of an average of the weights; None if none is asked for."""
    held_out_accuracy: float | None
    """Share of held-out examples whose class is predicted right; None without classes."""
    model: nn.Sequential
    """The model after the last step."""


@torch.random.fork_rng(devices=[])
def train_plainly(
    layers: Sequence[tuple[str, nn.Module]],
    batches: PlainBatches | PlainExamples | PlainPairs,
    settings: TrainSettings,
    *,
    micro: int,
    dtype: torch.dtype,
    float8: bool = False,
) -> PlainRun:
    """Trains a model for `settings.steps` steps, then evaluates it.

    Args:
        layers: name and module of each layer, with their initial weights, which are changed.
        batches: the tokens of each step.
        settings: of the run.
        micro: micro-batch size in sequences, a divisor of the batch.
        dtype: type of weights, activations and optimizer state.
        float8: whether linear layers between the first and the last one multiply 8-bit factors.
    """
    model = nn.Sequential(*(layer for _, layer in layers)).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if float8:
        use_plain_float8(layer for _, layer in layers[1:-1])
    dropouts = _keyed_dropouts(layers)
    routers: list[Any] = [module for module in model.modules() if hasattr(module, "balance_scale")]
    for router in routers:
        router.balance_scale = torch.tensor(1 / batches.batch, dtype=torch.float64)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ends = {id(parameter) for end in (model[0], model[-1]) for parameter in end.parameters()}
    hidden = [parameter for parameter in parameters if id(parameter) not in ends]
    names = {
        id(parameter): f"{name}.{path}"
        for name, layer in reversed(layers)
        for path, parameter in layer.named_parameters()
    }
    optimizer = plain_optimizer(parameters, settings, hidden=hidden, names=names)
    averages = [parameter.detach().clone() for parameter in parameters]
    losses, norms, rates = [], [], []
    places = PAIR_PLACES if isinstance(batches, PlainPairs) else 0
    taken = _batches_taken(settings.skip_batches or ())
    for step in range(1, settings.steps + 1):
        rates.append(plain_learning_rate(settings, step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1] * group["factor"]
        batch = next(taken)
        inputs, targets = batches.samples(batch)
        documents = None
        if isinstance(batches, PlainExamples | PlainPairs):
            documents = batches.documents(batch)
        optimizer.zero_grad()
        counts = Counts.of(targets, places)
        micro_losses = []
        for first in range(0, batches.batch, micro):
            for dropout in dropouts:
                dropout.begin(settings.seed, step, first)
            _tell_documents(model, documents, first, micro)
            outputs = _outputs(model, inputs[first : first + micro], settings.seed, step, first)
            sums = sums_of(outputs, targets[first : first + micro], places)
            loss = sums.nats / counts.tokens + sums.sentence_nats / max(counts.sentences, 1)
            z_loss = 0.0 if settings.z_loss is None else settings.z_loss * sums.z_loss
            (loss + z_loss / counts.tokens).backward()
            micro_losses.append(float(loss.detach()))
        limit = math.inf if settings.clip is None else settings.clip
        norms.append(float(clip_grad_norm_(parameters, limit)))
        optimizer.step()
        for average, parameter in zip(averages, parameters, strict=True):
            average.add_(parameter.detach() - average, alpha=1 - (settings.ema or 0.0))
        _move_balance_biases(routers)
        losses.append(math.fsum(micro_losses))
    held_out = batches, settings.evaluate_sequences, micro
    evaluated = [optimizer.state[p].get("x", p.detach().clone()) for p in parameters]
    with _weights_in_place(parameters, evaluated):
        held_out_loss, bits, accuracy = _evaluate(model, *held_out)
    with _weights_in_place(parameters, averages):
        averaged_loss = None if settings.ema is None else _evaluate(model, *held_out)[0]
    return PlainRun(
        losses=tuple(losses), gradient_norms=tuple(norms), learning_rates=tuple(rates),
        held_out_loss=held_out_loss, held_out_bits_per_byte=bits,
        held_out_loss_ema=averaged_loss, held_out_accuracy=accuracy, model=model,
    )  # fmt: skip


def _move_balance_biases(routers: Sequence[Any]) -> None:
    """Moves the bias of each expert by how its tokens of the step compare with the mean."""
    for router in routers:
        load, bias = router.load, router.balance_bias
        if bias is not None:
            mean = load.double().mean()
            bias += router.config.balance_bias * torch.sign(mean - load)
        load.zero_()


def plain_learning_rate(settings: TrainSettings, step: int) -> float:
    """The learning rate of a step, counted from 1: a straight rise, then the schedule's shape."""
    peak, rising = settings.learning_rate, round(settings.warmup * settings.steps)
    lowest, left = peak * settings.final_rate, settings.steps - step
    if step <= rising:
        return peak * step / rising
    match settings.schedule:
        case "constant":
            return peak
        case "inverse_sqrt":
            return peak * (step / max(rising, 1)) ** -0.5
        case "wsd":
            falling = max(1, round(settings.decay * settings.steps))
            return lowest + (peak - lowest) * min(1.0, left / falling)
        case "linear":
            return lowest + (peak - lowest) * left / (settings.steps - rising)
        case "cosine":
            angle = math.pi * (step - rising) / (settings.steps - rising)
            return (peak + lowest) / 2 + (peak - lowest) / 2 * math.cos(angle)


@contextmanager
def _weights_in_place(
    parameters: Sequence[nn.Parameter], values: Sequence[Tensor]
) -> Iterator[None]:
    """Gives the parameters other values while it is open."""
    own = [parameter.detach().clone() for parameter in parameters]
    for sources in (values, own):
        for parameter, source in zip(parameters, sources, strict=True):
            parameter.data.copy_(source)
        if sources is values:
            yield


def _batches_taken(skipped: Sequence[str]) -> Iterator[int]:
    """The numbers of the batches that are not left out, in order."""
    left_out: set[int] = set()
    for text in skipped:
        ends = [int(end) for end in text.split("-")]
        left_out.update(range(ends[0], ends[-1] + 1))
    return (number for number in itertools.count(1) if number not in left_out)


def _tell_documents(model: nn.Sequential, documents: Tensor | None, first: int, micro: int) -> None:
    """Tells all layers which document each token of a micro-batch belongs to."""
    part = None if documents is None else documents[first : first + micro]
    readers: list[Any] = [module for module in model.modules() if hasattr(module, "documents")]
    for module in readers:
        module.documents = part


def _outputs(model: nn.Sequential, inputs: Tensor, seed: int, step: int, first: int) -> Any:  # noqa: ANN401
    """What the last layer gives for a micro-batch, whose first sample has the index `first`."""
    x = inputs
    for index, layer in enumerate(model):
        # For random draws other than those of `nn.Dropout`.
        torch.manual_seed(_mixed(_mixed(_mixed(_mixed(seed) ^ step) ^ index) ^ first) >> 1)
        x = layer(x)
    return x


@torch.no_grad()
def _evaluate(
    model: nn.Sequential,
    batches: PlainBatches | PlainExamples | PlainPairs,
    count: int,
    micro: int,
) -> tuple[float | None, float | None, float | None]:
    """Loss in nats a token, bits per byte, and accuracy, over `count` held-out sequences."""
    if not count:
        return None, None, None
    inputs, targets, nbytes = batches.held_out_samples(count)
    has_pairs = isinstance(batches, PlainPairs)
    documents = None
    if isinstance(batches, PlainExamples | PlainPairs):
        documents = batches.held_out_documents(count)
    model.eval()
    places = PAIR_PLACES if has_pairs else 0
    nats, sentence_nats, right = 0.0, 0.0, 0
    for first in range(0, len(inputs), micro):
        _tell_documents(model, documents, first, micro)
        outputs = model(inputs[first : first + micro])
        sums = sums_of(outputs, targets[first : first + micro], places)
        nats += float(sums.nats)
        sentence_nats += float(sums.sentence_nats)
        right += sums.right
    counts = Counts.of(targets, places)
    bits = nats / math.log(2) / nbytes if nbytes else None
    loss = nats / counts.tokens + sentence_nats / max(counts.sentences, 1)
    if has_pairs:
        return loss, bits, right / counts.sentences
    return loss, bits, right / counts.tokens if targets.ndim == 1 else None


class _PlainKeyedDropout(nn.Module):
    """Dropout whose mask follows from (seed, step, layer, position, call, sample, element)."""

    def __init__(self, rate: float, layer: str, position: int) -> None:
        super().__init__()
        self._rate, self._position = rate, position
        self._layer = int.from_bytes(hashlib.sha256(layer.encode()).digest()[:8], "little")
        self._key = (0, 0, 0)
        self._calls = 0

    def begin(self, seed: int, step: int, first: int) -> None:
        """Begins a forward pass of a micro-batch whose first sample has the index `first`."""
        self._key, self._calls = (seed, step, first), 0

    def forward(self, x: Tensor) -> Tensor:
        """`x[b ...]`; in training some elements are 0 and the others grow."""
        if not self.training:
            return x
        rows = [self._kept(row, x[0].numel()) for row in range(len(x))]
        self._calls += 1
        mask = torch.from_numpy(np.stack(rows)).view(x.shape)
        return x * mask.to(x.dtype) * (1 / (1 - self._rate))

    def _kept(self, row: int, elements: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which elements of a sample are kept."""
        seed, step, first = self._key
        sample = _mixed(_mixed(_mixed(seed) ^ step) ^ (first + row))
        call = _mixed(self._position * _MAX_CALLS + self._calls)
        key = _mixed(sample ^ ((self._layer + call) % _WORD))
        z = np.arange(1, elements + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        kept: np.ndarray[tuple[int], np.dtype[np.bool_]] = (z >> np.uint64(33)) >= round(
            self._rate * 2**31
        )
        return kept


def _keyed_dropouts(layers: Sequence[tuple[str, nn.Module]]) -> tuple[_PlainKeyedDropout, ...]:
    """Gives every `nn.Dropout` with a rate above 0 a keyed mask, in place."""
    dropouts: list[_PlainKeyedDropout] = []
    for name, layer in layers:
        for position, (parent, child, rate) in enumerate(_active_dropouts(layer)):
            dropouts.append(_PlainKeyedDropout(rate, name, position))
            setattr(parent, child, dropouts[-1])
    return tuple(dropouts)


def _active_dropouts(layer: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Parent module, name and rate of each `nn.Dropout` with a rate above 0, in order."""

    def search() -> Iterator[tuple[nn.Module, str, float]]:
        for path, module in layer.named_modules():
            if type(module) is nn.Dropout and module.p > 0:
                parent, _, child = path.rpartition(".")
                yield layer.get_submodule(parent), child, module.p

    return list(search())


def _mixed(value: int) -> int:
    """SplitMix64's output for one integer."""
    return finalized((value + _GOLDEN) % _WORD)
