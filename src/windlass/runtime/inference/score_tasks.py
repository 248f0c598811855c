"""How likely the ranks of a plan find choices, which they answer together."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import log_softmax

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.errors import RequestError
from windlass.models import in_loss_precision
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.distributed.p2p import P2PCommunicator, output_shapes
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext

_BATCH_TOKENS = 4096
"""Tokens that pass through an accelerator at once, padding included. On a CPU each row passes
alone, as in lm-evaluation-harness, since products of another size round otherwise."""


def log_likelihoods(
    model: InferenceModel, choices: Sequence[EncodedChoice]
) -> list[ChoiceLikelihood]:
    """`sum_t log p(choice_t | context, choice_<t)` of each choice, in nats.

    A context that is too long for the model is cut to its last tokens.

    Raises:
        ValueError: a choice or its context has no token, or a choice has more than the model
            accepts.
    """
    most = 1 if model.device.type == "cpu" else _BATCH_TOKENS
    batches = ChoiceBatches(choices, model.max_sequence, batch_tokens=most)
    found = [ChoiceLikelihood(0.0, is_greedy=True)] * len(choices)
    all_logits = model.logits_of_batches(map(batches.inputs, range(len(batches))))
    for batch, logits in enumerate(all_logits):
        for index, likelihood in batches.likelihoods(batch, batches.predictions(batch, logits)):
            found[index] = likelihood
    return found


class ChoiceBatches:
    """Choices as batches of rows of similar length, so that little is padded.

    Args:
        longest: most tokens that the model reads; None if it sets no limit.
        batch_tokens: most tokens of a batch, padding included, unless one row has more.
        multiple: rows have a multiple of so many tokens.

    Raises:
        ValueError: a choice or its context has no token, or a choice has more than the model
            accepts.
    """

    def __init__(
        self,
        choices: Sequence[EncodedChoice],
        longest: int | None,
        *,
        batch_tokens: int,
        multiple: int = 1,
    ) -> None:
        self._choices, self._multiple = choices, multiple
        self._rows = [_row(choice, longest) for choice in choices]
        self._batches = _batches([len(row) - 1 for row in self._rows], batch_tokens)

    def __len__(self) -> int:
        return len(self._batches)

    def inputs(self, batch: int) -> Tensor:
        """What the model reads of a batch, all but the last tokens of its rows, `Int[b s]`."""
        rows = [torch.tensor(self._rows[index][:-1]) for index in self._batches[batch]]
        size = max(len(row) for row in rows)
        size += -size % self._multiple
        # No token can see what stands behind it.
        return torch.stack([functional.pad(row, (0, size - len(row))) for row in rows])

    def predictions(self, batch: int, logits: Tensor) -> Tensor:
        """The logits that predict the tokens of a batch's choices, `Float[t v]` of `[b s v]`."""
        spans = []
        for place, index in enumerate(self._batches[batch]):
            end, count = len(self._rows[index]) - 1, len(self._choices[index].tokens)
            spans.append(logits[place, end - count : end])
        return torch.cat(spans)

    def likelihoods(
        self, batch: int, predictions: Tensor
    ) -> Iterator[tuple[int, ChoiceLikelihood]]:
        """Each choice of a batch by its index, with its likelihood under `predictions`."""
        choices = [(index, self._choices[index].tokens) for index in self._batches[batch]]
        spans = predictions.split([len(tokens) for _, tokens in choices])
        for (index, tokens), logits in zip(choices, spans, strict=True):
            yield index, _likelihood(logits, tokens)


def _likelihood(logits: Tensor, tokens: Sequence[int]) -> ChoiceLikelihood:
    """The log-likelihood of tokens under the logits `Float[t v]` that predict them."""
    all_tokens = log_softmax(in_loss_precision(logits), dim=-1).cpu()
    chosen = torch.tensor(tokens)
    nats = all_tokens.gather(-1, chosen.unsqueeze(-1)).sum()
    return ChoiceLikelihood(float(nats), bool((all_tokens.argmax(-1) == chosen).all()))


def _row(choice: EncodedChoice, longest: int | None) -> list[int]:
    """Context and choice, with at most one token more than the model reads."""
    context, tokens = choice
    if not context or not tokens:
        raise ValueError("a choice and its context have at least one token each")
    if longest is not None and len(tokens) > longest:
        raise ValueError(f"a choice has {len(tokens)} tokens, and the model accepts {longest}")
    row = [*context, *tokens]
    return row if longest is None else row[-(longest + 1) :]


def _batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Indices of rows in batches of similar length."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > most_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def likelihoods_on_ranks(
    passes: RankPasses, choices: Sequence[EncodedChoice]
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, the same on all ranks.

    Each replica takes its part of the batches, also one that has a part of each sequence in
    training, and batches are no larger than there. Likelihoods are those of the precision that the
    run computes in.
    """
    batch, parallel = passes.context.plan.batch, passes.context.plan.parallel
    batches = ChoiceBatches(
        choices,
        passes.context.stack.max_sequence,
        batch_tokens=batch.micro * batch.sequence,
        multiple=int(parallel.tensor),
    )
    # Replicas that divide experts wait for each other in each pass, so that all take all batches.
    parts = 1 if parallel.expert else parallel.replicas
    mine = range(passes.dist.coord.data_rank % parts, len(batches), parts)
    return _likelihoods(passes, batches, mine, len(choices))


def _likelihoods(
    passes: RankPasses, batches: ChoiceBatches, mine: Sequence[int], count: int
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, from the batches of all ranks.

    Args:
        batches: the batches of all data-parallel ranks.
    """
    store, templates = passes.store, passes.whole_templates
    values = [passes.context.device.to_device(batches.inputs(batch)) for batch in mine]
    shapes: dict[torch.Size, tuple[torch.Size, ...]] = {}
    sizes = [x.shape for x in values]

    def shape(layer: int, index: int) -> torch.Size:
        size = sizes[index]
        if size not in shapes:
            on_meta = torch.zeros(size, dtype=torch.int64, device="meta")
            shapes[size] = output_shapes(templates, on_meta)
        return shapes[size][layer]

    rows: dict[int, ChoiceLikelihood] = {}

    def output(layers: range, index: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in layers:
                store.wait_for_layer(layer)
                tensors = store.layers[layer]
                x = templates[layer].raw_output(tensors.weights, tensors.buffers, x)
            if layers.stop < len(templates):
                return x
            template = templates[-1]
            predictions = batches.predictions(mine[index], template.logits_of_all_tokens(x))
            predictions = template.logits_of_all_columns(predictions)
        rows.update(batches.likelihoods(mine[index], predictions))
        # Nothing follows, and the logits of all batches would not fit.
        return x.new_empty(0)

    has_logits = passes.run(values, output, shape)
    # All tensor-parallel ranks of the last layer have the same, and so have replicas that divide
    # experts; the first one counts.
    coord, expert = passes.dist.coord, passes.context.plan.parallel.expert
    is_first = not coord.tensor_rank and not (expert and coord.data_rank)
    known = rows if has_logits and is_first else {}
    sums = [0.0] * (2 * count)
    for index, likelihood in known.items():
        sums[2 * index : 2 * index + 2] = likelihood.nats, float(likelihood.is_greedy)
    sums = passes.dist.all_reduce_sum(sums)
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [ChoiceLikelihood(nats, bool(is_greedy)) for nats, is_greedy in pairs]


def score_on_rank(
    context: RankContext,
    checkpoint: Checkpoint,
    choices: Sequence[EncodedChoice],
    on_progress: Callable[[], None],
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, the same on all ranks of a plan.

    All weights are frozen, so that a rank keeps its part of them alone, without any gradient or
    optimizer state.

    Args:
        context: what this rank runs; torch.distributed is initialized.
        checkpoint: a checkpoint with every layer in one file; weights are all that is read.
        on_progress: called whenever a batch has passed through a phase.

    Raises:
        RequestError: the plan has one device, or keeps weights outside of device memory.
        CheckpointError: the checkpoint is of another model.
    """
    plan, graph = context.plan, context.graph
    if graph is None or plan.offloads:
        raise RequestError("ranks score models that they hold in device memory")
    for layer in context.stack.layers:
        layer.requires_grad_(requires_grad=False)
    context.device.activate()
    groups = ProcessGroups(plan, graph, context.rank, context.device)
    templates = layer_templates(
        context.stack, compiled=False, tp_rank=groups.tensor_parallel, experts=groups.experts,
        loss=plan.loss, attention=plan.attention,
    )  # fmt: skip
    optimizer = Optimizer(context.settings, context.device, plan.moments)
    store = ParamStore(context, optimizer, groups, before_update=lambda _: None)
    try:
        store.initialize(checkpoint)
        p2p = P2PCommunicator(context, groups, store, templates)
        passes = RankPasses(
            context=context, store=store, templates=templates, whole_templates=templates,
            dist=groups, p2p=p2p, on_progress=on_progress,
        )  # fmt: skip
        return likelihoods_on_ranks(passes, choices)
    finally:
        store.close()
