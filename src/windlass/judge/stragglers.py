"""Stragglers: which rank, link, tier or host the extra time of a step comes from.

A rank that waits is a victim. So the time of a step is told apart into what a rank does itself,
what it transfers to and from an offload tier, and what it waits for others: one rank whose own work
grows is a straggler, and if all ranks wait longer and none works longer, it is the network.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.judge.evidence import Evidence, KindSeconds, RankTimes
from windlass.program import BLOCKING_KINDS, MeshCoord

Cause = Literal["rank", "link", "tier", "host"]
"""`rank`: one rank computes longer. `link`: messages take longer. `tier`: transfers to or from an
offload tier do. `host`: all ranks compute longer."""

_WAITS = frozenset(BLOCKING_KINDS) | {"send", "send_tied_weights", "send_tied_grads"}
_P2P = frozenset({"receive", "recv_tied_weights", "accumulate_tied_grads"})
_ALL_GLOBAL = ("grad_norm", "sync")
_ROLES = ("own", "tier", "tier wait", "wait")
_OWN_SHARE = 0.2
"""Ranks that take a fifth of the extra time for work of their own are not the network's victims."""
_ALIKE = 0.7
"""Links that are slowed by at least this share of the slowest one are slow together."""
_STEADY_EXCESS, _STEADY_SHARE = 0.15, 0.9
"""Without runs to compare with, a rank is a straggler if its own work takes 15 % longer than that
of the ranks with the same layers, and is the longest in 9 of 10 steps."""


class Culprit(NamedTuple):
    """Where extra time of a step comes from."""

    cause: Cause
    kind: str
    """The kind of instruction that it is spent in."""
    ranks: tuple[int, ...]
    """The slow rank, or the ranks at the ends of the slow link; all for a host."""
    seconds: float
    """Extra seconds of a step."""
    ratio: float
    """The kind's time over what it was before, or in other runs or ranks."""
    tier: str | None = None


Levels = Mapping[int, KindSeconds]
"""Median seconds by kind of each rank."""


def rank_levels(ranks: Mapping[int, RankTimes], steps: range) -> dict[int, dict[str, float]]:
    """Median seconds by kind of each rank over some steps; ranks that have none are left out."""
    levels = {}
    for rank, times in ranks.items():
        inside = _inside(times, steps)
        if inside.any():
            levels[rank] = {
                kind: float(np.median(values[inside])) for kind, values in times.kinds.items()
            }
    return levels


def peer_levels(peers: Sequence[Levels]) -> dict[int, dict[str, float]]:
    """The medians over several runs of their ranks' seconds by kind."""
    ranks = sorted({rank for levels in peers for rank in levels})
    result = {}
    for rank in ranks:
        of_rank = [levels[rank] for levels in peers if rank in levels]
        kinds = {kind for kinds in of_rank for kind in kinds}
        result[rank] = {
            kind: float(np.median([kinds.get(kind, 0.0) for kinds in of_rank])) for kind in kinds
        }
    return result


def find_culprit(before: Levels, after: Levels, evidence: Evidence) -> Culprit | None:
    """Where most of the extra time between two levels comes from; None if there is none.

    Args:
        before: seconds by kind of each rank in a healthy run, or before a change.
        after: those of the same ranks now.
        evidence: names the tiers and the ranks' coordinates.
    """
    ranks = sorted(set(before) & set(after))
    if not ranks:
        return None
    deltas = {rank: _difference(before[rank], after[rank]) for rank in ranks}
    own, tier, tier_wait, wait = (
        {rank: sum(s for kind, s in deltas[rank].items() if _role(kind, evidence) == role)
         for rank in ranks}
        for role in _ROLES
    )  # fmt: skip
    slowest = max(ranks, key=lambda rank: own[rank])
    others = [own[rank] for rank in ranks if rank != slowest]
    common = float(np.median(others)) if others else own[slowest]
    waits = min(wait.values()) if len(ranks) > 1 else 0.0
    transfers = max(ranks, key=lambda rank: tier[rank])
    parts: dict[Cause, float] = {
        "rank": own[slowest] - max(common, 0.0) if others else 0.0,
        "host": common,
        # What waits for a tier and then for other ranks is slow on all of them if the tier is.
        "tier": tier[transfers] + max(0.0, min(tier_wait.values())),
    }
    cause = max(parts, key=lambda name: parts[name])
    # A rank without a core also receives and answers late, so that all wait longer than it works.
    excess = float(np.median([sum(delta.values()) for delta in deltas.values()]))
    if parts[cause] < _OWN_SHARE * excess and waits > parts[cause]:
        cause, parts = "link", {"link": waits}
    seconds = parts[cause]
    if seconds <= 0:
        return None
    if cause == "link":
        return _link(before, after, deltas, seconds, evidence)
    roles, rank = (("tier", "tier wait"), transfers) if cause == "tier" else (("own",), slowest)
    kind = _largest(deltas[rank], roles, evidence)
    return Culprit(
        cause=cause, kind=kind, ranks=(rank,) if cause == "rank" else tuple(ranks),
        seconds=seconds, ratio=_ratio(before[rank], after[rank], kind),
        tier=evidence.tiers.get(kind) if cause == "tier" else None,
    )  # fmt: skip


def steady_straggler(evidence: Evidence, steps: range) -> Culprit | None:
    """A rank whose own work takes longer than that of the ranks with the same layers, all along."""
    worst: Culprit | None = None
    for group in _replicas(evidence.ranks):
        own = {rank: _own_seconds(evidence.ranks[rank], evidence, steps) for rank in group}
        count = min(map(len, own.values()))
        if not count:
            continue
        table = np.stack([own[rank][-count:] for rank in group])
        medians = np.median(table, axis=1)
        at = int(np.argmax(medians))
        rest = float(np.median(np.delete(medians, at)))
        slowest_in = float(np.mean(np.argmax(table, axis=0) == at))
        if rest <= 0 or medians[at] < rest * (1 + _STEADY_EXCESS) or slowest_in < _STEADY_SHARE:
            continue
        levels = rank_levels({rank: evidence.ranks[rank] for rank in group}, steps)
        rank = group[at]
        typical = peer_levels([{0: levels[other]} for other in group if other != rank])[0]
        kind = _largest(_difference(typical, levels[rank]), ("own",), evidence)
        seconds = float(medians[at]) - rest
        if worst is None or seconds > worst.seconds:
            worst = Culprit("rank", kind, (rank,), seconds, _ratio(typical, levels[rank], kind))
    return worst


def lateness(evidence: Evidence, steps: range, rank: int) -> float:
    """Seconds by which a rank comes later than the others to what all ranks do together.

    No clocks are compared: times count from the start of a step, which ranks begin together. A
    record without arrivals says it by the waits, since who comes last waits least.
    """
    together = next((k for k in _ALL_GLOBAL if k in evidence.ranks[rank].arrivals), None)
    if together is not None:
        came = {
            other: float(np.median(times.arrivals[together][_inside(times, steps)]))
            for other, times in evidence.ranks.items()
            if together in times.arrivals and _inside(times, steps).any()
        }
        sign = 1
    else:
        levels = rank_levels(evidence.ranks, steps)
        came = {r: sum(s for k, s in kinds.items() if k in _WAITS) for r, kinds in levels.items()}
        sign = -1
    others = [seconds for other, seconds in came.items() if other != rank]
    return sign * (came[rank] - float(np.median(others))) if others and rank in came else 0.0


def cpu_seconds(times: RankTimes, steps: range) -> float | None:
    """Median CPU time of a rank in some steps; None if it was not measured."""
    inside = _inside(times, steps)
    if times.cpu_seconds is None or not inside.any():
        return None
    return float(np.median(times.cpu_seconds[inside]))


def describe_rank(rank: int, coord: MeshCoord) -> str:
    """`rank 3 (stage 1, tensor 0, data 1)`."""
    return f"rank {rank} (stage {coord.stage}, tensor {coord.tensor_rank}, data {coord.data_rank})"


def is_wait(kind: str) -> bool:
    """Whether the time of a kind of instruction is spent waiting for other ranks."""
    return kind in _WAITS


def _link(
    before: Levels, after: Levels, deltas: Levels, seconds: float, evidence: Evidence
) -> Culprit:
    """The link whose ends both wait longest for each other."""
    ends: dict[tuple[str, tuple[int, ...]], float] = {}
    for kind in {kind for kinds in deltas.values() for kind in kinds if kind in _WAITS}:
        for group in _groups(kind, sorted(deltas), evidence.ranks):
            if len(group) > 1:
                score = min(deltas[rank].get(kind, 0.0) for rank in group)
                ends[kind, group] = score
    if not ends:
        kind = _largest(deltas[min(deltas)], ("wait",), evidence)
        return Culprit("link", kind, tuple(sorted(deltas)), seconds, 1.0)
    (kind, group), score = max(ends.items(), key=lambda item: item[1])
    alike = [ranks for (other, ranks), s in ends.items() if other == kind and s >= _ALIKE * score]
    ranks = tuple(sorted({rank for group in alike for rank in group}))
    return Culprit("link", kind, ranks, seconds, _ratio(before[group[0]], after[group[0]], kind))


def _groups(
    kind: str, ranks: Sequence[int], times: Mapping[int, RankTimes]
) -> list[tuple[int, ...]]:
    """The ranks that exchange something in a kind of instruction, group by group."""
    if kind in _ALL_GLOBAL:
        return [tuple(ranks)]
    coords = {rank: times[rank].coord for rank in ranks if rank in times}
    if kind in _P2P:
        return [
            (first, second)
            for first, a in coords.items()
            for second, b in coords.items()
            if b == a._replace(stage=a.stage + 1)
        ]
    return _replicas(times)


def _replicas(times: Mapping[int, RankTimes]) -> list[tuple[int, ...]]:
    """Ranks that hold the same layers: those of one stage and tensor-parallel rank."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(times):
        coord = times[rank].coord
        groups.setdefault((coord.stage, coord.tensor_rank), []).append(rank)
    return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]


def _own_seconds(times: RankTimes, evidence: Evidence, steps: range) -> npt.NDArray[np.float64]:
    inside = _inside(times, steps)
    own = [values[inside] for kind, values in times.kinds.items() if _role(kind, evidence) == "own"]
    return np.sum(own, axis=0) if own else np.empty(0)


def _inside(times: RankTimes, steps: range) -> npt.NDArray[np.bool_]:
    return np.asarray((times.steps >= steps.start) & (times.steps < steps.stop))


def _role(kind: str, evidence: Evidence) -> str:
    if kind in evidence.tiers:
        return "tier wait" if kind in _WAITS else "tier"
    return "wait" if kind in _WAITS else "own"


def _difference(before: KindSeconds, after: KindSeconds) -> dict[str, float]:
    kinds = set(before) | set(after)
    return {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in kinds}


def _largest(delta: KindSeconds, roles: Sequence[str], evidence: Evidence) -> str:
    kinds = [kind for kind in sorted(delta) if _role(kind, evidence) in roles]
    return max(kinds, key=lambda kind: delta[kind])


def _ratio(before: KindSeconds, after: KindSeconds, kind: str) -> float:
    return after.get(kind, 0.0) / before[kind] if before.get(kind) else float("inf")
