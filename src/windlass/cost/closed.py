"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_memory`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_ends import Loans, Passed, Reductions, alike, ends
from windlass.cost.closed_layers import Block, Chain, Floats, Ints, PassNumbers, Setting
from windlass.cost.closed_memory import Columns, Loaned, Parts, fullest, reduces_early
from windlass.cost.closed_pipeline import Durations, LoanBack, Shape, fold


class Run(NamedTuple):
    """What the passes of a plan depend on."""

    setting: Setting
    again: bool
    """Whether layers are recomputed."""
    micros: int
    """Micro-batches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""
    stage_bytes: Floats
    """Of each stage (columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Plans of one shape: where each stands in tables in which what they share is once."""

    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]
    pairs: Ints
    """rts and rts' (columns) of all pairs of all blocks in turn."""
    run: Ints
    """Of each plan."""
    pair: Ints
    """Of each plan."""

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.run)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Rows":
        """Some of the plans, with the runs that they need."""
        runs, run = np.unique(self.run[chosen], return_inverse=True)
        return replace(
            self, runs=tuple(self.runs[at] for at in runs), run=run, pair=self.pair[chosen]
        )

    def one(self, place: int) -> "Rows":
        """One of the plans."""
        return self.only(np.arange(self.count) == place)

    @classmethod
    def of(cls, families: Sequence[tuple[Block, Sequence[Run]]]) -> "Rows":
        """Plans that run in each of some ways with each pair of a block, for several blocks."""
        counts = np.array([len(block.pairs) for block, _ in families])
        firsts = np.concatenate([[0], np.cumsum(counts)])
        runs = [run for _, able in families for run in able]
        of_run = [at for at, (_, able) in enumerate(families) for _ in able]
        each = counts[of_run]
        run = np.repeat(np.arange(len(runs)), each)
        within = np.arange(len(run)) - np.repeat(np.cumsum(each) - each, each)
        return cls(
            runs=tuple(runs),
            blocks=tuple(block for block, _ in families),
            pairs=np.array([pair for block, _ in families for pair in block.pairs]),
            run=run,
            pair=within + np.repeat(firsts[of_run], each),
        )


def closed(chain: Chain, shape: Shape, ends: tuple[int, ...], rows: Rows) -> Totals:
    """Seconds of a step and bytes of the near tier, of plans of one shape.

    Args:
        chain: its layers and their prices.
        shape: of all plans.
        ends: first layer of each chunk, and the chain's length.
        rows: the plans.

    Raises:
        KeyError: the machine states no rate, or no link, that a plan needs.
    """
    parts = Parts(shape, ends)
    numbers = tuple(chain.passes(each.setting) for each in rows.runs)
    shared = _Shared(chain, parts, rows)
    stage_bytes = _stage_bytes(chain, parts, rows, numbers) + shared.held[rows.pair]
    stops = bool(shared.reductions.waited.any())
    taken = _Taken(chain, parts, rows, numbers, stops=stops)
    return Totals(
        step_seconds=_step(parts, taken, shared, rows, clips=chain.base.clip),
        peak_bytes=stage_bytes.max(axis=1),
        stage_bytes=stage_bytes,
    )


def least_seconds(chain: Chain, shape: Shape, ends: tuple[int, ...], runs: Sequence[Run]) -> Floats:
    """What no plan of each run can be faster than.

    A stage has all its passes to do; before the first a micro-batch comes through the stages before
    it, and behind the last its gradient goes back through them. Only the weights' parts of parted
    backward passes may come later than that gradient, so that there its way back is left out.
    """
    parts = Parts(shape, ends)
    numbers = [chain.passes(each.setting) for each in runs]
    forward = np.stack([each.forward for each in numbers])
    again = forward * _again(parts, runs)
    if shape.order == "zero-bubble":
        backward = again + np.stack([e.backward_input + e.backward_weight for e in numbers])
        way = parts.by_chunk(forward)
    else:
        backward = again + np.stack([each.backward for each in numbers])
        way = parts.by_chunk(forward + backward)
    way = way[:, : shape.pipeline]
    micros = np.array([[each.micros] for each in runs])
    through = np.cumsum(way, axis=1) - way + micros * parts.by_stage(forward + backward)
    return np.asarray(through.max(axis=1))


def least_bytes(chain: Chain, shape: Shape, blocks: Sequence[Block]) -> Floats:
    """What no plan of each pair needs less of: the state of an even share of the layers."""
    held = np.concatenate([chain.states(block).held.sum(axis=1) for block in blocks])
    return held / shape.pipeline


def _alike(chain: Chain, shape: Shape, runs: Sequence[Run]) -> Ints:
    """A number for each run that those of the same memory share.

    How many replicas there are does not matter, nor how many micro-batches, but for an order that
    holds all of them, and for rows that are looked up in each.
    """
    grows = shape.repeats and shape.order == "gpipe"
    known: dict[object, int] = {}
    found = []
    for setting, again, micros in runs:
        rows = chain.rows_bytes(setting.tensor, setting.micro, micros)
        key = (setting[:5], again, rows, micros if grows else 0)
        found.append(known.setdefault(key, len(known)))
    return np.array(found)


def _again(parts: Parts, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Which layers (columns) of which runs (rows) are computed again."""
    layer = np.arange(parts.layers)
    inner = (layer > 0) & (layer < parts.layers - 1)
    return np.array([[each.again] for each in runs]) & inner


def _stage_bytes(
    chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
) -> Floats:
    """What comes and goes on each stage (columns) of each plan at its fullest.

    Of rts and rts' it matters whether they are above 1, and only in a few shapes how far.
    """
    weights, optimizer = rows.pairs[rows.pair].T
    shards = optimizer if reduces_early(parts.shape) else np.minimum(optimizer, 2)
    alike = _alike(chain, parts.shape, rows.runs)
    sorts = (alike[rows.run] * (1 + int(shards.max())) + shards) * 2 + (weights > 1)
    _, first, sort = np.unique(sorts, return_index=True, return_inverse=True)
    run = rows.run[first]
    runs = [rows.runs[at] for at in run]
    columns = Columns(
        held=tuple(chain.held(each.setting._replace(replicas=1)) for each in runs),
        widths=np.array(
            [(n.token_bytes, n.gradient_bytes, n.weight_bytes) for n in (numbers[at] for at in run)]
        ),
        micros=np.array([each.micros for each in runs]),
        rows=np.stack(
            [chain.rows(each.setting.tensor, each.setting.micro, each.micros) for each in runs]
        ),
        again=np.array([each.again for each in runs]),
        shards=shards[first].astype(np.float64),
        shares=weights[first] > 1,
    )
    device = chain.machine.device
    held = np.array([device.process_bytes(compiled=each.setting.compiled) for each in runs])
    loan = None
    if chain.tied:
        lent = np.array([chain.lent_elements(each.setting.tensor) for each in runs])
        loan = Loaned(*chain.tied[0], lent)
    return np.asarray((fullest(parts, columns, loan) + held[:, None])[sort])


def _loans(
    chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
) -> Loans | None:
    """What the first tied weights cost; None if they are not on two stages."""
    if not chain.tied:
        return None
    layer, owner = chain.tied[0]
    if parts.stage[owner] == parts.stage[layer]:
        return None
    settings = [run.setting for run in rows.runs]
    each_byte, each_message = chain.message_ways(settings, parts.shape.pipeline)
    lent = np.array([chain.lent_elements(each.tensor) for each in settings])
    widths = np.array([(each.weight_bytes, each.gradient_bytes) for each in numbers])
    lending, message = (lent[:, None] * widths * each_byte[:, None] + each_message[:, None]).T
    once = parts.shape.micros == 1
    parted = parts.shape.order == "zero-bubble"
    after = [
        (each.backward_weight if parted else each.backward)[layer]
        + (each.sum_first if once else each.sum_later)[layer]
        for each in numbers
    ]
    taking = [chain.take_over_seconds(each.tensor, each.precision, each.sums) for each in settings]
    return Loans(
        owner=owner,
        lending=lending,
        message=message,
        after=np.array(after),
        taking=np.array(taking),
    )


class _Taken:
    """Seconds of passes, a row for each of `Rows.runs`."""

    def __init__(
        self,
        chain: Chain,
        parts: Parts,
        rows: Rows,
        numbers: tuple[PassNumbers, ...],
        *,
        stops: bool,
    ) -> None:
        shape = parts.shape
        in_turn = chain.machine.rule == "bulk-synchronous"
        loans = _loans(chain, parts, rows, numbers)
        again = _again(parts, rows.runs)

        def layers(name: str) -> Floats:
            return np.stack([getattr(each, name) for each in numbers])

        parted = shape.order == "zero-bubble"
        repeated = np.where(again, layers("forward"), 0.0)
        backward = repeated + layers("backward_input" if parted else "backward")
        weight = layers("backward_weight") if parted else np.zeros_like(backward)
        sums = (layers("sum_later"), layers("sum_first"))
        adding = [(weight if parted else backward) + each for each in sums]
        by_chunk = [parts.by_chunk(each).T for each in (backward, weight, *adding)]
        load = np.zeros((shape.chunks, len(numbers)))
        load[[0, -1]] = np.array([each.load_seconds for each in numbers])
        ways = chain.message_ways([run.setting for run in rows.runs], shape.pipeline)
        self.message = np.array([each.output[0] for each in numbers]) * ways[0] + ways[1]
        self.forward = parts.by_chunk(layers("forward"))
        folded = fold(
            shape,
            Durations(
                forward=self.forward.T,
                backward=by_chunk[0] if parted else by_chunk[2],
                backward_first=by_chunk[0] if parted else by_chunk[3],
                weight=by_chunk[2] if parted else by_chunk[1],
                weight_first=by_chunk[3] if parted else by_chunk[1],
                load=load,
                message=self.message,
                lending=np.zeros(len(numbers)) if loans is None else loans.lending,
                lender=0 if loans is None else int(parts.stage[loans.owner]),
                loan=None if loans is None or parted else _way_back(loans, parts),
                stops=stops,
                in_turn=in_turn,
            ),
            np.array([each.micros for each in rows.runs]),
        )
        self.passed = Passed(
            folded=folded,
            layers=adding[int(shape.micros == 1)],
            message=self.message,
            loans=loans,
            in_turn=in_turn,
            alike=alike(chain.sorts, again),
        )


def _way_back(loans: Loans, parts: Parts) -> LoanBack:
    return LoanBack(
        message=loans.message,
        after=loans.after,
        taking=loans.taking,
        owner=int(parts.chunk[loans.owner]),
    )


class _Shared:
    """Seconds and bytes of what replicas share, a row for each pair of all blocks, by stage."""

    def __init__(self, chain: Chain, parts: Parts, rows: Rows) -> None:
        states = [chain.states(block) for block in rows.blocks]

        def layers(name: str) -> Floats:
            return np.concatenate([getattr(each, name) for each in states])

        self.held = parts.by_stage(layers("held"))
        self.gather = parts.by_stage(layers("gather"))
        self.reductions = Reductions(links=layers("reduce"), waited=layers("waited"))
        self.after = parts.by_stage(layers("after"))
        if chain.base.clip:
            nbytes = parts.by_stage(layers("norm_bytes"))
            counts = np.cumsum([0, *(len(block.pairs) for block in rows.blocks)])
            rate = np.concatenate(
                [
                    chain.norm_rates(block, nbytes[low:high])
                    for block, (low, high) in zip(rows.blocks, pairwise(counts), strict=True)
                ]
            )
            launches = parts.by_stage(layers("norm_launches"))
            self.after += np.where(nbytes > 0, nbytes / rate + launches, 0.0)


def _step(parts: Parts, taken: _Taken, shared: _Shared, rows: Rows, *, clips: bool) -> Floats:
    """When the last stage has updated its weights."""
    reduced = ends(parts, taken.passed, shared.reductions).of(rows.run, rows.pair)
    reduced += _late(taken, shared, rows)
    after = shared.after[rows.pair]
    if clips:  # the norm waits for all stages
        return np.asarray(reduced.max(axis=1) + after.max(axis=1))
    return np.asarray((reduced + after).max(axis=1))


def _late(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """By how much gathering and lending weights hold up the first passes."""
    forward = taken.forward[:, : shared.gather.shape[1]] + taken.message[:, None]
    came = np.cumsum(forward, axis=1) - forward
    gather = shared.gather[rows.pair] - came[rows.run]
    return np.asarray(np.maximum(gather.max(axis=1), 0.0)[:, None])
