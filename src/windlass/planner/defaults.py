"""Defaults that depend on model and machine: batch, sequence, steps and learning rate."""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from math import ceil, lcm

from pydantic import Field

from windlass.document import Document
from windlass.errors import RequestError
from windlass.models import is_pretrained
from windlass.schema import (
    ChosenDefault,
    DataSize,
    Graph,
    Machine,
    Request,
    ResolvedRequest,
    TrainSettings,
    optimizer_law,
)

_MIN_SEQUENCE = 2
"""Fewest tokens of a sequence: one that is seen, and one that sees it."""


class _Row(Document):
    """Defaults of the models and machines for which a row of the table holds."""

    examples: bool | None = None
    """Whether the model takes images or other examples, no tokens; None holds for tokens."""
    device: str | None = None
    """Kind of device; None holds for any."""
    pretrained: bool | None = None
    """Whether the weights are trained already; None holds for any."""
    max_parameters: int | None = None
    """Parameters of the largest model; None holds for any."""
    max_sequence: int = 1
    """Most tokens of a sequence, for models that take longer ones or any."""
    tokens: int | None = None
    """Tokens of a step; None if `sequences` states its size."""
    sequences: int = 1
    steps: int | None = None
    """Steps of a run; None sees `tokens_per_parameter`."""
    reason: str


class _Rate(Document):
    """The learning rate of the models for which a row holds."""

    examples: bool | None = None
    """Whether the model takes images or other examples; None holds for any."""
    adapter: bool | None = None
    """Whether adapters are trained; None holds for any."""
    pretrained: bool | None = None
    """Whether the weights are trained already; None holds for any."""
    encoder: bool | None = None
    """Whether tokens see later ones, as in BERT; None holds for any."""
    max_parameters: int | None = None
    """Parameters of the largest model; None holds for any."""
    rate: float
    reason: str


class _TuningBatch(Document):
    """The batch that pretrained weights are fine-tuned with, where the data fill it."""

    adapter: bool | None = None
    """Whether adapters are trained; None holds for any."""
    sequences: int
    reason: str


class _Epochs(Document):
    """Passes over data of up to so many rows."""

    max_rows: int | None = None
    """Most rows; None holds for any."""
    epochs: int
    reason: str


class _FineTuning(Document):
    """What follows from the data when a model is fine-tuned."""

    steps_per_epoch: int
    """Fewest steps of a pass, as far as there are that many rows: a larger batch is lowered."""
    batches: tuple[_TuningBatch, ...] = Field(min_length=1)
    epochs: tuple[_Epochs, ...] = Field(min_length=1)


class _Table(Document):
    """The content of `defaults.toml`."""

    fine_tuning: _FineTuning
    tokens_per_parameter: int
    steps_reason: str
    rows: tuple[_Row, ...] = Field(min_length=1)
    rates: tuple[_Rate, ...] = Field(min_length=1)


def resolve_defaults(
    request: Request,
    graph: Graph,
    machine: Machine,
    *,
    most_sequences: int | None = None,
    data: DataSize | None = None,
) -> tuple[ResolvedRequest, tuple[ChosenDefault, ...]]:
    """The request with values chosen where it leaves them open, and why so.

    Images and other examples have as many positions as their model mixes, whatever is asked for.

    Args:
        request: what a user asks for; whatever it names is kept.
        most_sequences: the largest default batch, where a larger one does not fit; None means any.
        data: how much there is to train on, where defaults follow from that; None means elsewhere.

    Raises:
        RequestError: `train.sequence` is none that the model can be trained with.
    """
    _require_sequence(request, graph)
    chosen = tuple(_defaults(request, graph, machine, most_sequences, data))
    values: dict[str, object] = {
        default.key.removeprefix("train."): default.value for default in chosen
    }
    if graph.examples is not None:
        values["sequence"] = graph.examples.positions
    train = TrainSettings.model_validate(request.train.model_dump() | values)
    content = {name: getattr(request, name) for name in Request.model_fields}
    return ResolvedRequest(**(content | {"train": train})), chosen


def smaller_batches(request: Request, batch: int) -> tuple[int, ...]:
    """Default batches to try, largest first, where plans with the usual one do not fit.

    Args:
        request: what a user asks for; a batch that it names stays.
        batch: the usual default in sequences.

    Returns:
        A quarter of the batch, a quarter of that, and so on to 1; nothing if it is no default.
    """
    if request.train.batch is not None or batch == 1:
        return ()
    return (*(batch >> shift for shift in range(2, batch.bit_length() - 1, 2)), 1)


def _defaults(
    request: Request,
    graph: Graph,
    machine: Machine,
    most_sequences: int | None,
    data: DataSize | None,
) -> Iterator[ChosenDefault]:
    train, table = request.train, _table()
    row = next(row for row in table.rows if _holds(row, request, graph, machine))
    sequence, batch, steps = train.sequence, train.batch, train.steps
    if graph.examples is not None:
        sequence = graph.examples.positions
    elif sequence is None:
        sequence, reason = _sequence(row, graph, data)
        yield ChosenDefault(key="train.sequence", value=sequence, reason=reason)
    rows = _rows_of_epoch(data, sequence)
    if batch is None:
        filled = rows if data is not None and data.is_named else None
        usual, reason = _usual_batch(row, request, machine, sequence, filled)
        batch, pins = _divisible_batch(_round(usual), request, machine)
        reason = pins or reason
        if most_sequences is not None and most_sequences < batch:
            reason = f"the usual {batch} does not fit"
            batch, _ = _divisible_batch(_round(most_sequences), request, machine)
        yield ChosenDefault(key="train.batch", value=batch, reason=reason)
    if steps is None:
        tokens = table.tokens_per_parameter * graph.parameter_count
        reason = row.reason if row.steps else table.steps_reason
        steps = row.steps or ceil(tokens / (batch * sequence))
        if rows is not None:
            steps, reason = _steps_of_epochs(rows, batch, data, (steps, reason))
        yield ChosenDefault(key="train.steps", value=steps, reason=reason)
    if train.learning_rate is None:
        row_rate = next(rate for rate in table.rates if _rate_holds(rate, request, graph))
        rate, reason = row_rate.rate, row_rate.reason
        law = optimizer_law(train.optimizer)
        is_relative = train.relative_step is not False or not law.relative_step
        own = law.learning_rate if is_relative else None
        if own is not None:
            rate, reason = own.of_run(rate, reason, batch)
        yield ChosenDefault(key="train.learning_rate", value=rate, reason=reason)


def _require_sequence(request: Request, graph: Graph) -> None:
    """Refuses a `train.sequence` of a model that has no such choice, or too short a one."""
    sequence, examples = request.train.sequence, graph.examples
    if examples is not None and sequence not in (None, examples.positions):
        raise RequestError(
            f"`train.sequence` = {sequence}, and `{graph.name}` takes {examples.noun}, which have "
            f"{examples.positions} position{'s'[: examples.positions > 1]}; leave it out"
        )
    if examples is None and sequence is not None and sequence < _MIN_SEQUENCE:
        raise RequestError(f"`train.sequence` = {sequence}, should be at least {_MIN_SEQUENCE}")


def _holds(row: _Row, request: Request, graph: Graph, machine: Machine) -> bool:
    if bool(row.examples) != (graph.examples is not None):
        return False
    right_size = row.max_parameters is None or graph.parameter_count <= row.max_parameters
    right_start = row.pretrained in (None, is_pretrained(request.model.name))
    return right_size and right_start and row.device in (None, machine.device.kind)


def _rate_holds(rate: _Rate, request: Request, graph: Graph) -> bool:
    right_size = rate.max_parameters is None or graph.parameter_count <= rate.max_parameters
    right_start = rate.pretrained in (None, is_pretrained(request.model.name))
    right_weights = rate.adapter in (None, request.lora is not None)
    right_kind = rate.encoder is None or rate.encoder == _is_encoder(graph)
    right_inputs = rate.examples in (None, graph.examples is not None)
    return right_size and right_start and right_weights and right_kind and right_inputs


def _is_encoder(graph: Graph) -> bool:
    """Whether the attention of any layer lets tokens see later ones."""
    # A mask of its own, which has s x s numbers, hides tokens, as a sliding window does.
    return any(
        op.is_causal is False and op.read_bytes.ss == 0
        for kind in graph.kinds.values()
        for cost in kind.costs[:1]
        for op in cost.forward
    )


def _sequence(row: _Row, graph: Graph, data: DataSize | None) -> tuple[int, str]:
    """The default sequence and its reason: what the data need, where that is less than usual."""
    sequence = min(graph.max_sequence or row.max_sequence, row.max_sequence)
    if data is not None and data.sequence is not None and data.sequence < sequence:
        reason = "the longest conversation needs" if data.rows else "the text is no longer than"
        return max(data.sequence, _MIN_SEQUENCE), f"{reason} {data.sequence}"
    if graph.max_sequence is None:
        return sequence, "for a model that takes sequences of any length"
    if graph.max_sequence > row.max_sequence:
        return sequence, f"the model takes {graph.max_sequence}"
    return sequence, "the longest that the model takes"


def _rows_of_epoch(data: DataSize | None, sequence: int) -> int | None:
    """Rows of a pass over the data; None if the defaults do not follow from them."""
    if data is None or not data.by_epochs:
        return None
    if data.rows is not None:
        return max(1, data.rows)
    return None if data.tokens is None else max(1, data.tokens // sequence)


def _usual_batch(
    row: _Row, request: Request, machine: Machine, sequence: int, rows: int | None
) -> tuple[int, str]:
    """The usual batch, and where it comes from; in fine-tuning, one that the data fill."""
    if rows is None:
        return row.sequences if row.tokens is None else max(1, row.tokens // sequence), row.reason
    tuning = _table().fine_tuning
    usual = next(
        batch for batch in tuning.batches if batch.adapter in (None, request.lora is not None)
    )
    batch, reason = usual.sequences, usual.reason
    if machine.devices > batch:
        batch, reason = machine.devices, f"a row for each of {machine.devices} devices"
    most = max(1, rows // tuning.steps_per_epoch)
    if most >= batch:
        return batch, reason
    # Many degrees divide a power of two.
    least = min(rows, tuning.steps_per_epoch)
    return 1 << (most.bit_length() - 1), f"{rows:,} rows make at least {least} steps then"


def _steps_of_epochs(
    rows: int, batch: int, data: DataSize | None, usual: tuple[int, str]
) -> tuple[int, str]:
    """Steps of whole passes over the data, and the reason."""
    if data is not None and not data.is_named:
        # Nobody asked for these data: a short run shows that all works, and more is no use.
        steps = max(1, rows // batch)
        reason = "one pass over the text that every machine has; name yours as `data.source`"
        return min((steps, reason), usual)
    row = next(
        row for row in _table().fine_tuning.epochs if row.max_rows is None or rows <= row.max_rows
    )
    passes = f"{row.epochs} epoch{'s'[: row.epochs > 1]} of {rows:,} rows"
    return max(1, ceil(row.epochs * rows / batch)), f"{passes}, {row.reason}"


def _round(batch: int) -> int:
    """The batch rounded down to its four leading bits, so that many degrees divide it."""
    shift = max(0, batch.bit_length() - 4)
    return batch >> shift << shift


def _divisible_batch(batch: int, request: Request, machine: Machine) -> tuple[int, str | None]:
    """The batch, or the nearest that the request's degrees divide and why it is another one."""
    micro, accumulation = request.batch.micro, request.batch.accumulation
    sharding = (request.sharding.parameters or 1, request.sharding.optimizer or 1)
    data = request.parallel.data or lcm(*sharding)
    unit = data * (micro or 1) * (accumulation or 1)
    is_exact = micro and accumulation and (request.parallel.data or machine.devices == 1)
    if not is_exact and batch % unit == 0:
        return batch, None
    factors = {
        "data-parallel degree": data, "micro-batch size": micro or 1,
        "accumulation": accumulation or 1,
    }  # fmt: skip
    names = " x ".join(f"{name} {factor}" for name, factor in factors.items() if factor > 1)
    if is_exact:
        return unit, names or "micro-batch size 1 x accumulation 1"
    return unit * max(1, batch // unit), f"a multiple of {names}"


@cache
def _table() -> _Table:
    text = files("windlass.planner").joinpath("defaults.toml").read_text(encoding="utf-8")
    return _Table.model_validate(tomllib.loads(text))
