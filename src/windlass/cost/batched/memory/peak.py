"""Peak device memory of many plans, from sorts of configs and sharding options.

A config's memory depends on how layers compute, not on the number of replicas; that of an option on
whether weights and state are sharded, and what is always there. So peaks are computed for each
combination of both sorts, and plans only add and compare.
"""

from dataclasses import replace

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.config_keys import RecomputeConfig
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.layer_ops import HELD
from windlass.cost.batched.max_plus import largest_sum
from windlass.cost.batched.memory.size_classes import OTHERS, SIZES, KindTraits, columns_of
from windlass.cost.batched.memory.stage_peaks import ChainLayout, StagePeaks, stage_peaks
from windlass.cost.batched.plan_table import LayerConfigTable, LazyTable, PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.stage_sums import StagePartition, recompute_by_layer


def peak_bytes(chain: LayerCosts, parts: StagePartition, rows: PlanTable, always: Floats) -> Floats:
    """Peak bytes of the fullest stage, `[plan]`.

    Args:
        chain: costs of layers.
        parts: partition of the layers.
        rows: the plans.
        always: bytes that are always there, `[sharding, stage sort]`.
    """
    sorts, there = _there(chain, parts, rows, tuple(parts.sort.tolist()))
    return largest_sum(there, always, sorts.of_plans, rows.sharding)


def stage_bytes(
    chain: LayerCosts, parts: StagePartition, rows: PlanTable, always: Floats
) -> Floats:
    """Peak bytes, `[plan, stage]`; arguments as in `peak_bytes`."""
    sorts, there = _there(chain, parts, rows, tuple(range(parts.shape.pipeline)))
    return np.asarray(there[sorts.of_plans] + always[rows.sharding][:, parts.sort])


def _there(
    chain: LayerCosts, parts: StagePartition, rows: PlanTable, stages: tuple[int, ...]
) -> tuple["_Sorts", Floats]:
    """Bytes without what is always there, `[sort, stage sort]`.

    Args:
        chain: costs of layers.
        parts: partition of the layers.
        rows: the plans.
        stages: sort of each stage.
    """
    found = {
        again: _fullest(chain, parts, rows.recomputes[again], stages)
        for again in np.flatnonzero(np.bincount(rows.recompute)).tolist()
    }
    told = _Told(chain, parts.shape, rows, found, shards=False)
    if told.shards_matter:
        told = _Told(chain, parts.shape, rows, found, shards=True)
    return told.sorts, told.nbytes.T


class _Told:
    """Bytes of each sort of stage (rows) for all sorts of plans (columns).

    Gradients take most in the fewest shards. So if with two shards no moment that counts them is
    fuller than the others, the number of shards does not matter.
    """

    def __init__(
        self,
        chain: LayerCosts,
        shape: PipelineShape,
        rows: PlanTable,
        found: dict[int, StagePeaks],
        *,
        shards: bool,
    ) -> None:
        self.sorts = _Sorts(chain, shape, rows, shards=shards)
        self.shards_matter = False
        sizes, own = _sizes(chain, rows.layer_configs, self.sorts)
        beyond = self.sorts.micros - shape.settled
        parts = list[Floats]()
        for again, moments in found.items():
            chosen = self.sorts.there[again]
            nbytes = self._bytes(moments, sizes[np.ix_(moments.columns, chosen)], beyond[chosen])
            parts.append(nbytes + own[chosen])
        self.nbytes = np.concatenate(parts, axis=1)

    def _bytes(self, found: StagePeaks, sizes: Floats, beyond: Floats) -> Floats:
        nbytes = found.counts @ sizes
        if found.growth is not None:
            nbytes += (found.growth @ sizes) * beyond
        plain = len(nbytes) - len(found.telling)
        most = np.maximum.reduceat(nbytes[:plain], found.firsts, axis=0)
        for sort, own in zip(found.telling, nbytes[plain:], strict=True):
            self.shards_matter |= bool((own > most[sort]).any())
            np.maximum(most[sort], own, out=most[sort])
        return np.asarray(most)


class _Sorts:
    """Sorts of plans whose stages are as full, apart from recompute and what is always there.

    The number of replicas does not matter, nor that of micro-batches, except under a schedule that
    keeps all of them alive, and for embedding rows of each. Of sharding degrees it matters whether
    they are above 1, and by how much only if `shards` count.
    """

    def __init__(
        self, chain: LayerCosts, shape: PipelineShape, rows: PlanTable, *, shards: bool
    ) -> None:
        parted = rows.pairs[:, 1] if shards else np.minimum(rows.pairs[:, 1], 2)
        kinds, of_pair = np.unique(parted * 2 + (rows.pairs[:, 0] > 1), return_inverse=True)
        is_embedding = any(kind.is_embedding for kind in chain.numbered)
        counted = is_embedding or (shape.repeats and shape.schedule == "gpipe")
        runs = rows.layer_configs.alone[rows.layer_config]
        if counted:
            runs = runs * (int(rows.microbatches.max()) + 1) + rows.microbatches
        _, first, of_run = np.unique(runs, return_index=True, return_inverse=True)
        count = len(first) * len(kinds)
        place = (rows.recompute * count + of_run * len(kinds))[rows.config] + of_pair[rows.sharding]
        there = np.zeros((int(rows.recompute.max()) + 1, count), dtype=bool)
        there.ravel()[place] = True
        self.of_plans: Ints = (np.cumsum(there) - 1)[place]
        """Sort of each plan, grouped by recompute, `[plan]`."""
        used = np.flatnonzero(there.any(axis=0))
        self.there = there[:, used]
        """Whether a plan of each sort has each recompute, `[recompute, sort]`."""
        run, kind = np.divmod(used, len(kinds))
        self.micros: Floats = rows.microbatches[first][run].astype(np.float64)
        self.settings: Ints = rows.layer_config[first][run]
        self.looked_up: Floats = _looked_up(chain, rows, first)[run]
        self.shards: Floats = (kinds[kind] // 2).astype(np.float64)
        self.shares = kinds[kind] % 2 > 0


def _looked_up(chain: LayerCosts, rows: PlanTable, runs: Ints) -> Floats:
    """Bytes of embedding rows of earlier micro-batches, `[config, kind]`."""
    settings, places = rows.layer_configs, rows.layer_config[runs]
    before = settings.micro[places] * (rows.microbatches[runs] - 1)
    both = settings.tensor[places] * (int(before.max()) + 1) + before
    _, first, alike = np.unique(both, return_index=True, return_inverse=True)
    asked = zip(settings.at(places[first]), before[first].tolist(), strict=True)
    return np.stack([chain.rows(each.tensor, sequences) for each, sequences in asked])[alike]


def _fullest(
    chain: LayerCosts, parts: StagePartition, again: RecomputeConfig, stages: tuple[int, ...]
) -> StagePeaks:
    """The fullest moments, as counts of sizes of the layer kinds.

    They are found with kinds numbered in order of appearance: those of selective variants are the
    same.
    """
    modes = recompute_by_layer(parts.shape, parts.ends, again)
    of_layers = chain.kinds_as(modes).tolist()
    places = {kind: place for place, kind in enumerate(dict.fromkeys(of_layers))}
    own = [chain.numbered[kind] for kind in places]
    layout = ChainLayout(
        shape=parts.shape,
        ends=parts.ends,
        layers=tuple(
            (places[at], mode == "full") for at, mode in zip(of_layers, modes, strict=True)
        ),
        kinds=KindTraits(
            is_embedding=tuple(kind.is_embedding for kind in own),
            bare=tuple(kind.parameter_count == 0 for kind in own),
        ),
        tie=chain.tied[0] if chain.tied else None,
    )
    found = stage_peaks(layout, stages)
    whole = columns_of(list(places), len(chain.numbered))
    return replace(found, columns=whole[found.columns])


def _sizes(chain: LayerCosts, settings: LayerConfigTable, sorts: "_Sorts") -> tuple[Floats, Floats]:
    """The sizes that moments count, `[size, sort]`, and bytes of the process itself."""
    found = np.ascontiguousarray(_numbers(chain, settings).at(sorts.settings).T)
    tokens, wide, narrow, lent, own = found[-_REST:, None]
    each = found[:-_REST].reshape(len(HELD), -1, found.shape[1])
    held = dict(zip(HELD, each, strict=True))
    flat, converts = sorts.shards > 1, wide != narrow
    sums = held["gradients"] + sorts.looked_up.T
    shard = np.where(flat, held["gradients"] / sorts.shards, sums)
    sizes: dict[str, Floats] = {
        "output": held["output"],
        "kept": held["saved"],
        "forward": np.maximum(held["forward_peak"], held["output"] + held["saved"]),
        "again": np.maximum(held["forward_peak"], held["output"]),
        "backward": held["backward_peak"],
        "fresh": held["pass_gradients"],
        "largest": held["largest_pass_gradient"] * (flat | converts),
        "converted": held["largest_pass_gradient"] * converts,
        "sums": sums,
        "shard": shard,
        "flat": shard * flat,
        "whole": held["weights"] * sorts.shares,
        "tokens": tokens,
        "lent gradient": lent * wide,
        "lent weights": lent * narrow,
    }
    return np.concatenate([sizes[name] for name in (*SIZES, *OTHERS)]), own[0]


_REST = 5
"""Numbers of a configuration besides what its passes hold."""


def _numbers(chain: LayerCosts, settings: LayerConfigTable) -> LazyTable:
    """What passes hold by layer kind, followed by `_REST` numbers, `[config, number]`.

    These are bytes of a micro-batch's tokens, of a gradient and of a weight element, elements of
    tied weights, and bytes of the process itself.
    """
    device = chain.machine.device

    def of(places: Ints) -> Floats:
        passes = chain.passes(settings.at(places))
        compiled = settings.compiled[places]
        own = np.where(compiled, *(device.process_bytes(compiled=each) for each in (True, False)))
        rest = np.column_stack([passes.widths, passes.lent, own])
        return np.concatenate([passes.held.reshape(len(places), -1), rest], axis=1)

    return settings.table(chain, "held", of)
