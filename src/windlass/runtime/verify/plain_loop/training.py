"""A training loop as one would write it in plain PyTorch, to compare a run with.

It shares no data, loss, optimizer, schedule or dropout code with what runs a plan: the whole model
is one `nn.Sequential`, `optimizers` has its optimizer, and `data_order` makes the batches.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from windlass.runtime.verify.plain_loop.data_order import PlainBatches
from windlass.runtime.verify.plain_loop.documents import PlainDocuments
from windlass.runtime.verify.plain_loop.dropout import key_dropouts, mixed
from windlass.runtime.verify.plain_loop.examples import PlainExamples
from windlass.runtime.verify.plain_loop.float8 import use_plain_float8
from windlass.runtime.verify.plain_loop.losses import Counts, sums_of
from windlass.runtime.verify.plain_loop.masks import PlainMasks
from windlass.runtime.verify.plain_loop.optimizers import plain_optimizer
from windlass.runtime.verify.plain_loop.rows import PlainRows
from windlass.schema import SparsityRequest, TrainSettings

PlainData = PlainBatches | PlainExamples | PlainRows
"""The samples of each step, and those that are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEvaluation:
    """What an evaluation on held-out samples gave."""

    loss: float
    """Mean loss in nats a token."""
    bits_per_byte: float | None
    accuracy: float | None
    """Share of examples whose class is predicted right; None without classes."""
    loss_ema: float | None = None
    """The loss of an average of the weights; None if none is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """What a run in plain PyTorch gave."""

    losses: tuple[float, ...]
    """Mean loss of each step in nats a token."""
    gradient_norms: tuple[float, ...]
    """Global gradient norm of each step, before clipping."""
    learning_rates: tuple[float, ...]
    evaluations: Mapping[int, PlainEvaluation]
    """By the step after which they were made."""
    model: nn.Sequential
    """The model after the last step."""


@torch.random.fork_rng(devices=[])
def train_plainly(
    layers: Sequence[tuple[str, nn.Module]],
    batches: PlainData,
    settings: TrainSettings,
    *,
    micro: int,
    dtype: torch.dtype,
    float8: bool = False,
    sparsity: SparsityRequest | None = None,
    joined: Mapping[str, Sequence[int]] | None = None,
) -> PlainRun:
    """Trains a model for `settings.steps` steps, and evaluates it as often as they say.

    Args:
        layers: name and module of each layer, with their initial weights, which are changed.
        micro: micro-batch size in sequences, a divisor of the batch.
        float8: whether linear layers between the first and the last one multiply 8-bit factors.
        sparsity: which weights are kept, and when that changes; None means a dense model.
        joined: rows of each matrix in a weight that is several, by its full name; None if none is.
    """
    run = _PlainLoop(
        layers, batches, settings, micro, dtype, float8=float8, sparsity=sparsity, joined=joined
    )
    losses, norms, rates = [], [], []
    evaluations: dict[int, PlainEvaluation] = {}
    taken = _batches_taken(settings.skip_batches or ())
    for step in range(1, settings.steps + 1):
        rates.append(plain_learning_rate(settings, step))
        loss, norm = run.step(step, next(taken), rates[-1])
        losses.append(loss)
        norms.append(norm)
        is_due = step % settings.evaluate_every == 0 or step == settings.steps
        if is_due and settings.evaluate_sequences:
            evaluations[step] = run.evaluate()
    return PlainRun(
        losses=tuple(losses), gradient_norms=tuple(norms), learning_rates=tuple(rates),
        evaluations=evaluations, model=run.model,
    )  # fmt: skip


class _PlainLoop:
    """A model, its optimizer and its data."""

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        batches: PlainData,
        settings: TrainSettings,
        micro: int,
        dtype: torch.dtype,
        *,
        float8: bool,
        sparsity: SparsityRequest | None,
        joined: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self._batches, self._settings, self._micro = batches, settings, micro
        self.model = nn.Sequential(*(layer for _, layer in layers)).train()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        if float8:
            use_plain_float8(layer for _, layer in layers[1:-1])
        self._dropouts = key_dropouts(layers)
        self._experts = PlainExperts(self.model, batches.batch)
        self._masks = PlainMasks(layers, sparsity, seed=settings.seed, steps=settings.steps)
        self._documents = PlainDocuments(self.model)
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = _optimizer(layers, self._parameters, settings, joined)
        self._averages = [parameter.detach().clone() for parameter in self._parameters]

    def step(self, step: int, batch: int, rate: float) -> tuple[float, float]:
        """Trains on one batch; the mean loss in nats a token, and the norm before clipping."""
        settings, batches, micro = self._settings, self._batches, self._micro
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        inputs, targets = batches.samples(batch)
        documents = batches.documents(batch)
        self._optimizer.zero_grad()
        counts = Counts.of(targets, batches.places)
        losses = []
        for first in range(0, batches.batch, micro):
            for dropout in self._dropouts:
                dropout.begin(settings.seed, step, first)
            rows = slice(first, first + micro)
            self._documents.begin(None if documents is None else documents[rows])
            outputs = self._outputs(inputs[rows], step, first)
            sums = sums_of(outputs, targets[rows], batches.places)
            loss = sums.nats / counts.tokens + sums.sentence_nats / max(counts.sentences, 1)
            z_loss = 0.0 if settings.z_loss is None else settings.z_loss * sums.z_loss
            (loss + z_loss / counts.tokens + self._experts.balance()).backward()
            self._masks.end_micro_batch()
            losses.append(float(loss.detach()))
        limit = math.inf if settings.clip is None else settings.clip
        norm = float(clip_grad_norm_(self._parameters, limit))
        self._optimizer.step()
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.add_(parameter.detach() - average, alpha=1 - (settings.ema or 0.0))
        self._experts.end_step()
        self._masks.end_step(step, self._state_of)
        return math.fsum(losses), norm

    def evaluate(self) -> PlainEvaluation:
        """Evaluates the weights, or what the optimizer evaluates, and then their averages."""
        state, parameters = self._optimizer.state, self._parameters
        evaluated = [state[each].get("x", each.detach().clone()) for each in parameters]
        with _weights_in_place(parameters, evaluated):
            result = self._held_out()
        if self._settings.ema is None:
            return result
        with _weights_in_place(parameters, self._averages):
            return replace(result, loss_ema=self._held_out().loss)

    def _state_of(self, weight: Tensor) -> list[Tensor]:
        """The tensors beside a weight that have its shape: moments, and its average."""
        index = next(i for i, each in enumerate(self._parameters) if each is weight)
        state = [each for each in self._optimizer.state[weight].values() if torch.is_tensor(each)]
        return [self._averages[index], *(each for each in state if each.shape == weight.shape)]

    def _outputs(self, x: Any, step: int, first: int) -> Any:  # noqa: ANN401
        """What the last layer gives for a micro-batch, whose first sample has an index."""
        for index, layer in enumerate(self.model):
            # For random draws other than those of `nn.Dropout`.
            key = mixed(mixed(mixed(self._settings.seed) ^ step) ^ index)
            torch.manual_seed(mixed(key ^ first) >> 1)
            x = layer(x)
        return x

    @torch.no_grad()
    def _held_out(self) -> PlainEvaluation:
        batches, micro, count = self._batches, self._micro, self._settings.evaluate_sequences
        inputs, targets, nbytes = batches.held_out_samples(count)
        documents = batches.held_out_documents(count)
        self.model.eval()
        nats, sentence_nats, right = 0.0, 0.0, 0
        for first in range(0, len(inputs), micro):
            rows = slice(first, first + micro)
            self._documents.begin(None if documents is None else documents[rows])
            sums = sums_of(self.model(inputs[rows]), targets[rows], batches.places)
            nats += float(sums.nats)
            sentence_nats += float(sums.sentence_nats)
            right += sums.right
        self.model.train()
        counts = Counts.of(targets, batches.places)
        loss = nats / counts.tokens
        # Weights say how much is learned of a target; each stands for its bytes alike.
        bits = loss * counts.learned / math.log(2) / nbytes if nbytes else None
        has_classes = targets.ndim == 1
        return PlainEvaluation(
            loss=loss + sentence_nats / max(counts.sentences, 1), bits_per_byte=bits,
            accuracy=right / (counts.sentences or counts.tokens)
            if counts.sentences or has_classes
            else None,
        )  # fmt: skip


def _optimizer(
    layers: Sequence[tuple[str, nn.Module]],
    parameters: Sequence[nn.Parameter],
    settings: TrainSettings,
    joined: Mapping[str, Sequence[int]] | None,
) -> torch.optim.Optimizer:
    """The optimizer of some weights of a model."""
    first, last = layers[0][1], layers[-1][1]
    ends = {id(parameter) for end in (first, last) for parameter in end.parameters()}
    hidden = [parameter for parameter in parameters if id(parameter) not in ends]
    names = {
        id(parameter): f"{name}.{path}"
        for name, layer in reversed(layers)
        for path, parameter in layer.named_parameters()
    }
    return plain_optimizer(parameters, settings, hidden=hidden, names=names, joined=joined)


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


class PlainExperts:
    """Computes each expert for all tokens, and weighs what it gives.

    Args:
        batch: global batch in sequences, over which the balance loss is a mean.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        self._batch = batch
        self._terms: list[Tensor] = []
        self._routers: list[Any] = [
            module for module in model.modules() if hasattr(module, "balance_scale")
        ]
        for module in model.modules():
            if getattr(module, "router", None) in self._routers:
                module.forward = partial(self._mix, module)

    def balance(self) -> Tensor | float:
        """The balance loss of what ran since the last call, as a share of the batch's."""
        terms, self._terms = self._terms, []
        return sum(terms) / self._batch if terms else 0.0

    def end_step(self) -> None:
        """Moves the bias of each expert by how its tokens of the step compare with the mean."""
        for router in self._routers:
            load, bias = router.load, router.balance_bias
            if bias is not None:
                mean = load.double().mean()
                bias += router.config.balance_bias * torch.sign(mean - load)
            load.zero_()

    def _mix(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401  a module of the model
        router, config = module.router, module.router.config
        logits = x @ _weight(router).T
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
        ranked = scores if router.balance_bias is None else scores + router.balance_bias
        chosen = ranked.topk(config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        picks = functional.one_hot(chosen, config.count)  # [b s k E]
        if module.training:
            router.load.add_(picks.sum((0, 1, 2)))
            rows = zip(picks, scores, strict=True)
            self._terms += [config.balance_loss * _unevenness(*row) for row in rows]
        if config.capacity is not None:
            slots = config.slots(x.shape[1])
            place = picks.flatten(1, 2).cumsum(1).view_as(picks)
            picks = picks * (place <= slots)
        share = (weights.unsqueeze(-1) * picks).sum(2)  # [b s E]
        y = torch.zeros_like(x)
        for index in range(config.count):
            y = y + share[..., index, None] * _expert(module.experts, index, x)
        if module.shared is None:
            return y
        common = module.shared(x)
        return y + (
            common if module.shared_gate is None else common * module.shared_gate(x).sigmoid()
        )


def _unevenness(picks: Tensor, scores: Tensor) -> Tensor:
    """`sum_e f_e P_e` of one sequence, which is 1 where all experts have the same load.

    Args:
        picks: 1 for each choice of a token, `Int[s k E]`.
        scores: of the router, `Float[s E]`.
    """
    sequence, per_token, count = picks.shape
    f = picks.sum((0, 1)) * count / (sequence * per_token)
    p = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return (f * p).sum()


def _expert(experts: Any, index: int, x: Tensor) -> Tensor:  # noqa: ANN401  a module of the model
    """What one expert gives of all tokens, `[b s d]`."""
    inner = x @ _weight(experts.up)[index].T
    if experts.gate is None:
        approximate = "tanh" if experts.activation == "gelu_tanh" else "none"
        inner = functional.gelu(inner, approximate=approximate)
    else:
        gate = x @ _weight(experts.gate)[index].T
        if experts.activation == "swiglu":
            gate = gate * gate.sigmoid()
        else:
            approximate = "tanh" if experts.activation == "geglu_tanh" else "none"
            gate = functional.gelu(gate, approximate=approximate)
        inner = gate * inner
    return inner @ _weight(experts.down)[index].T


def _weight(module: Any) -> Tensor:  # noqa: ANN401  a module of the model
    """The weight of a layer, or of each expert's, with what its adapter adds."""
    weight: Tensor = module.weight
    if hasattr(module, "lora_a"):
        weight = weight + module.scale * (module.lora_b @ module.lora_a)
    return weight
