"""Gathers the evidence on a run: its journals, those of its peers, its prediction and its data."""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windlass.api.training.run_files import planned_from_record
from windlass.api.training.setup import load_run_tokens, make_batches, prepare_tokens
from windlass.errors import InputErrors, RequestError, WindlassError
from windlass.judge import (
    DEFAULT_PRIOR,
    Curve,
    DocumentCounts,
    Evidence,
    HostLoad,
    NoisePrior,
    Peer,
    PredictedTime,
    RankTimes,
    fit_noise_prior,
    stall_share,
)
from windlass.program import mesh_coord
from windlass.record import Catalog, RunQuery, RunRow
from windlass.schema import DEVICE_TIER, PLAN_FILE, Parallelism, Plan, Prediction
from windlass.tracking import RunRecord, Series, journal_ranks, load_run, read_run_id, read_series

_CURVES = ("loss", "gradient_norm", "learning_rate")
_KIND_PREFIX = "seconds."
_PEERS_WITH_CURVES, _PEERS_WITH_RANKS = 20, 5
"""Newest peers whose series are read, and those of all ranks: a run may have hundreds of peers."""
_PRIOR_INPUTS = ("graph", "plan", "machine")
_DATA_STEPS = 1000
"""Steps whose documents are looked up at most."""
_OWN_KEYS = ("train.seed",)
"""Settings that like runs differ in."""

KindTier = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """What earlier runs say of a run."""

    peers: tuple[Peer, ...] = ()
    prior: NoisePrior = DEFAULT_PRIOR
    differences: tuple[str, ...] = ()
    """What the run was asked for otherwise than all of its peers, a clause each."""


NO_HISTORY = History()


def read_history(folder: Path, root: Path) -> History:
    """The peers of a run among the runs under `root`, and how much runs vary there.

    Args:
        folder: the run folder.
        root: the folder that holds the run folders; a run that lies elsewhere has no history.

    Raises:
        RecordError: `folder` holds no run.
        StorageError: the disk is full.
    """
    run_id = read_run_id(folder)
    if folder.resolve().parent != root.resolve():
        return NO_HISTORY
    with Catalog.open(root) as catalog:
        catalog.refresh()
        rows = [row for row in catalog.peers(run_id) if row.seconds]
        groups: dict[tuple[str | None, ...], list[float]] = {}
        for row in catalog.rows(RunQuery(archived=None)):
            if row.seconds and not row.broken and row.id != run_id:
                key = tuple(row.inputs.get(name) for name in _PRIOR_INPUTS)
                groups.setdefault(key, []).append(math.log(row.seconds))
        own = catalog.row(run_id)
    peers = tuple(_peer(row, own, position) for position, row in enumerate(rows))
    prior = fit_noise_prior(groups.values())
    return History(peers=peers, prior=prior, differences=_differences(own, rows))


def gather_evidence(folder: Path, history: History, *, with_documents: bool = False) -> Evidence:
    """The evidence on a run, as it is in its folder now.

    Args:
        folder: the run folder.
        history: what earlier runs say of it.
        with_documents: whether to look up which documents each step was trained on, which may
            tokenize the text.

    Raises:
        RecordError: the folder holds no run.
    """
    record = load_run(folder)
    plan, prediction = record.plan, record.prediction
    series = {rank: read_series(folder, rank) for rank in journal_ranks(folder)}
    first = series.get(0, {})
    reason = str(record.events[-1].fields.get("reason", "")) if record.events else ""
    return Evidence(
        state=record.state,
        reason=reason,
        seconds=_curve(first, "seconds"),
        curves={name: _curve(first, name) for name in _CURVES if name in first},
        ranks={rank: _rank_times(rank, one, plan) for rank, one in series.items() if one},
        peers=history.peers,
        prior=history.prior,
        predicted=_predicted(prediction),
        tiers=_tiers(plan),
        sizes=_sizes(plan),
        differences=history.differences,
        load=_host_loads(series),
        documents=_document_counts(record) if with_documents else None,
    )


def _peer(row: RunRow, own: RunRow, position: int) -> Peer:
    """One peer; with its curves if it is one of the newest."""
    comparable = row.steps == own.steps
    seconds = row.seconds or math.nan
    if position >= _PEERS_WITH_CURVES:
        return Peer(seconds=seconds, comparable=comparable)
    first = read_series(row.folder)
    plan = _document(Plan, row.folder / PLAN_FILE)
    levels = {}
    ranks = journal_ranks(row.folder) if position < _PEERS_WITH_RANKS else (0,)
    for rank in ranks:
        times = _rank_times(rank, read_series(row.folder, rank) if rank else first, plan)
        levels[rank] = {kind: float(np.median(v)) for kind, v in times.kinds.items()}
    return Peer(
        seconds=seconds,
        comparable=comparable,
        curves={name: _curve(first, name) for name in _CURVES if name in first},
        stalls=stall_share(_curve(first, "seconds").values),
        kinds=levels,
    )


def _curve(series: Mapping[str, Series], name: str) -> Curve:
    if name not in series:
        return Curve(np.empty(0, dtype=np.int64), np.empty(0))
    return Curve(series[name].steps, series[name].values)


def _rank_times(rank: int, series: Mapping[str, Series], plan: Plan | None) -> RankTimes:
    """The times of one rank; a step without a kind of instruction took no time for it."""
    steps = _curve(series, "seconds").steps
    kinds = {}
    for name, one in series.items():
        if name.startswith(_KIND_PREFIX):
            values = np.zeros(len(steps))
            values[np.isin(steps, one.steps)] = one.values[np.isin(one.steps, steps)]
            kinds[name.removeprefix(_KIND_PREFIX)] = values
    coord = mesh_coord(rank, plan.parallel if plan else Parallelism())
    return RankTimes(coord, steps, kinds)


def _predicted(prediction: Prediction | None) -> PredictedTime | None:
    if prediction is None:
        return None
    return PredictedTime(prediction.step_seconds, prediction.low_seconds, prediction.high_seconds)


def _tiers(plan: Plan | None) -> dict[str, str]:
    """The offload tier that each kind of instruction transfers to or from."""
    if plan is None:
        return {}
    offload = plan.offload
    tiers = {
        "prefetch_weights": offload.parameters,
        "update": offload.optimizer,
        "offload_grads": offload.gradients,
        "offload_activation": offload.activations,
        "reload_activation": offload.activations,
    }
    return {kind: tier for kind, tier in tiers.items() if tier != DEVICE_TIER}


def _sizes(plan: Plan | None) -> dict[str, int]:
    if plan is None:
        return {}
    return {
        "the data-parallel ranks": plan.parallel.replicas,
        "the micro-batches": plan.batch.accumulation,
        "the devices": plan.parallel.devices,
    }


def _host_loads(series: Mapping[int, Mapping[str, Series]]) -> dict[int, HostLoad]:
    """What other processes did on each rank's host."""
    del series
    return {}


def _differences(own: RunRow, peers: Sequence[RunRow]) -> tuple[str, ...]:
    """What the run was asked for otherwise than all peers that agree on it."""
    if not peers:
        return ()
    clauses = []
    for key, value in own.settings.items():
        others = {peer.settings.get(key) for peer in peers}
        if key not in _OWN_KEYS and len(others) == 1 and value not in others:
            clauses.append(f"`{key}` is {value}, and {others.pop()} in all peers")
    for name in ("code", "environment", "data"):
        prints = Counter(peer.inputs.get(name) for peer in peers)
        if own.inputs.get(name) is not None and own.inputs[name] not in prints:
            clauses.append(f"the {name} is another one (`windlass diff` says how)")
    return tuple(clauses)


def _document_counts(record: RunRecord) -> DocumentCounts | None:
    """Samples of each step by document and by folder; None if its text is not to be had."""
    with contextlib.suppress(WindlassError):
        planned = planned_from_record(record)
        tokens = load_run_tokens(record.folder) or prepare_tokens(planned.request, None)
        if record.meta.get("tokens") != tokens.fingerprint:
            return None
        batches = make_batches(planned, tokens)
        steps = [step.step for step in record.steps][-_DATA_STEPS:]
        return _count(batches, steps)
    return None


def _count(batches: object, steps: Sequence[int]) -> DocumentCounts | None:
    from windlass.data import Batches

    if not isinstance(batches, Batches):
        return None
    rows = []
    for step in steps:
        counted: Counter[str] = Counter()
        for sample in range(batches.batch):
            documents = set(batches.document_names(step, sample))
            counted.update(documents | {str(Path(name).parent) for name in documents})
        rows.append(counted)
    names = sorted({name for row in rows for name in row})
    index = {name: column for column, name in enumerate(names)}
    counts = np.zeros((len(rows), len(names)))
    for at, row in enumerate(rows):
        for name, number in row.items():
            counts[at, index[name]] = number
    return DocumentCounts(np.asarray(steps, dtype=np.int64), tuple(names), counts)


def _document(cls: type[Plan], path: Path) -> Plan | None:
    with contextlib.suppress(RequestError, InputErrors, OSError):
        return cls.load(path)
    return None
