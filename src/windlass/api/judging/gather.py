"""Gathers the evidence on a run: its journals, those of its peers, its prediction and its data."""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from windlass.api.training.inputs.batches import make_batches
from windlass.api.training.inputs.run_data import load_run_tokens, prepare_data
from windlass.api.training.run_files import planned_from_record
from windlass.document import Document
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
from windlass.schema import (
    DEVICE_TIER,
    ENVIRONMENT_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    Environment,
    Machine,
    Parallelism,
    Plan,
    Prediction,
    RunState,
)
from windlass.tracking import Series, journal_ranks, load_run, read_run_id, read_series

D = TypeVar("D", bound=Document)
_GroupKey = tuple[str | None, ...]
_CURVES = ("loss", "gradient_norm", "learning_rate")
_KIND_PREFIX, _ARRIVAL_PREFIX = "seconds.", "arrival."
_PEERS_WITH_CURVES, _PEERS_WITH_RANKS = 20, 5
"""Newest peers whose series are read, and those of all ranks: a run may have hundreds of peers."""
_PRIOR_INPUTS = ("graph", "plan", "machine")
_DATA_STEPS = 1000
"""Steps whose documents are looked up at most, the last ones."""
_FEWEST_STEPS = 20
"""A run with fewer steps is nobody's peer."""
_OWN_KEYS = ("train.seed",)
"""Settings that like runs differ in."""

Values = npt.NDArray[np.float64]
"""`Float[step]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """What a run is judged by that does not change while it trains."""

    plan: Plan | None = None
    predicted: PredictedTime | None = None
    cores: int | None = None
    """Cores of the only host of all ranks; None if there are several, or it is not known."""
    peers: tuple[Peer, ...] = ()
    prior: NoisePrior = DEFAULT_PRIOR
    residuals: tuple[float, ...] = ()
    """Logarithms of measured over predicted step time of the other plans in the record."""
    differences: tuple[str, ...] = ()
    """What the run was asked for otherwise than all of its peers, a clause each."""


def read_history(folder: Path, root: Path) -> History:
    """The plan and the prediction of a run, its peers, and how much runs vary under `root`.

    Args:
        folder: the run folder.
        root: the folder that holds the run folders; a run that lies elsewhere has no peers.

    Raises:
        RecordError: `folder` holds no run.
        StorageError: the disk is full.
    """
    run_id = read_run_id(folder)
    prediction = _document(Prediction, folder / PREDICTION_FILE)
    machine = _document(Machine, folder / MACHINE_FILE)
    environment = _document(Environment, folder / ENVIRONMENT_FILE)
    history = History(
        plan=_document(Plan, folder / PLAN_FILE),
        predicted=_predicted(prediction),
        cores=environment.threads if environment and machine and machine.hosts == 1 else None,
    )
    if folder.resolve().parent != root.resolve():
        return history
    with Catalog.open(root) as catalog:
        catalog.refresh()
        rows = [row for row in catalog.peers(run_id) if row.seconds and row.step >= _FEWEST_STEPS]
        own = catalog.row(run_id)
        groups: dict[_GroupKey, list[float]] = {}
        residuals: dict[_GroupKey, list[float]] = {}
        for row in catalog.rows(RunQuery(archived=None)):
            if row.seconds and row.step >= _FEWEST_STEPS and not row.broken and row.id != run_id:
                key = _group_key(row)
                groups.setdefault(key, []).append(math.log(row.seconds))
                if row.ratio and key != _group_key(own):
                    residuals.setdefault(key, []).append(math.log(row.ratio))
    return replace(
        history,
        peers=tuple(_peer(row, own, position) for position, row in enumerate(rows)),
        prior=fit_noise_prior(groups.values()),
        residuals=tuple(float(np.median(values)) for values in residuals.values()),
        differences=_differences(own, rows),
    )


def gather_evidence(
    folder: Path,
    history: History,
    *,
    state: RunState = "running",
    reason: str = "",
    documents: DocumentCounts | None = None,
) -> Evidence:
    """The evidence on a run, as its journals are now.

    Args:
        folder: the run folder.
        history: from `read_history`.
        state: the state of the run.
        reason: why the run ended, if it ended badly.
        documents: from `document_counts`, if a loss is known to be wrong.
    """
    series = {rank: read_series(folder, rank) for rank in journal_ranks(folder)}
    first = series.get(0, {})
    return Evidence(
        state=state,
        reason=reason,
        seconds=_curve(first, "seconds"),
        curves=_curves(first),
        ranks={rank: _rank_times(rank, one, history.plan) for rank, one in series.items() if one},
        peers=history.peers,
        prior=history.prior,
        predicted=history.predicted,
        residuals=history.residuals,
        tiers=_tiers(history.plan),
        sizes=_sizes(history.plan),
        differences=history.differences,
        load=_host_loads(history.cores, series),
        targets=_targets(first),
        documents=documents,
    )


def document_counts(folder: Path) -> DocumentCounts | None:
    """Samples of each step by document and by folder, which may tokenize the run's text.

    None if the text is not to be had, or has changed.

    Raises:
        RecordError: `folder` holds no run.
    """
    record = load_run(folder)
    with contextlib.suppress(WindlassError):
        planned = planned_from_record(record)
        tokens = load_run_tokens(folder) or prepare_data(planned.request, None)
        if record.meta.get("tokens") == tokens.fingerprint:
            steps = [step.step for step in record.steps][-_DATA_STEPS:]
            skipped = planned.request.train.skip_batches
            return _count(make_batches(planned, tokens), steps, skipped)
    return None


def _peer(row: RunRow, own: RunRow, position: int) -> Peer:
    """One peer; with its curves if it is one of the newest."""
    comparable = row.steps == own.steps
    seconds = row.seconds or math.nan
    if position >= _PEERS_WITH_CURVES:
        return Peer(seconds=seconds, comparable=comparable)
    first = read_series(row.folder)
    plan = _document(Plan, row.folder / PLAN_FILE)
    levels, cpu = {}, {}
    ranks = journal_ranks(row.folder) if position < _PEERS_WITH_RANKS else (0,)
    for rank in ranks:
        times = _rank_times(rank, read_series(row.folder, rank) if rank else first, plan)
        levels[rank] = {kind: float(np.median(v)) for kind, v in times.kinds.items()}
        if times.cpu_seconds is not None:
            cpu[rank] = float(np.median(times.cpu_seconds))
    return Peer(
        seconds=seconds,
        comparable=comparable,
        curves=_curves(first),
        stalls=stall_share(_curve(first, "seconds").values),
        kinds=levels,
        cpu_seconds=cpu,
    )


def _group_key(row: RunRow) -> _GroupKey:
    return tuple(row.inputs.get(name) for name in _PRIOR_INPUTS)


def _curves(series: Mapping[str, Series]) -> dict[str, Curve]:
    """The curves of a run, without the norms of steps that a scaled loss made it skip."""
    curves = {name: _curve(series, name) for name in _CURVES if name in series}
    if "loss_scale" in series and "gradient_norm" in curves:
        norms = curves["gradient_norm"]
        kept = np.isfinite(norms.values)
        curves["gradient_norm"] = Curve(norms.steps[kept], norms.values[kept])
    return curves


def _targets(series: Mapping[str, Series]) -> int | None:
    """Targets of a step, at most: its tokens, or its examples; None if they were not recorded."""
    tokens = _curve(series, "tokens").values
    return int(tokens.max()) if len(tokens) else None


def _curve(series: Mapping[str, Series], name: str) -> Curve:
    if name not in series:
        return Curve(np.empty(0, dtype=np.int64), np.empty(0))
    return Curve(series[name].steps, series[name].values)


def _rank_times(rank: int, series: Mapping[str, Series], plan: Plan | None) -> RankTimes:
    """The times of one rank; a step without a kind of instruction took no time for it."""
    steps = _curve(series, "seconds").steps

    def aligned(one: Series) -> Values:
        values = np.zeros(len(steps))
        values[np.isin(steps, one.steps)] = one.values[np.isin(one.steps, steps)]
        return values

    def of_prefix(prefix: str) -> dict[str, Values]:
        found = {name: one for name, one in series.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): aligned(one) for name, one in found.items()}

    cpu = series.get("cpu_seconds")
    return RankTimes(
        mesh_coord(rank, plan.parallel if plan else Parallelism()),
        steps,
        of_prefix(_KIND_PREFIX),
        of_prefix(_ARRIVAL_PREFIX),
        None if cpu is None else aligned(cpu),
    )


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
        # These first wait for a shard of the weights.
        "unshard_weights": offload.parameters,
        "all_gather_params": offload.parameters,
        "free_shard": offload.parameters,
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


def _host_loads(
    cores: int | None, series: Mapping[int, Mapping[str, Series]]
) -> dict[int, HostLoad]:
    """What other processes did lately on the host of all ranks; nothing of several hosts."""
    if cores is None:
        return {}
    seconds = _lately(series.get(0, {}), "seconds")
    if not seconds:
        return {}
    own_cores = sum(_lately(one, "cpu_seconds") or 0.0 for one in series.values()) / seconds
    moved = ("read_bytes", "written_bytes")
    own_bytes = sum(_lately(one, name) or 0.0 for one in series.values() for name in moved)
    loads = {}
    for rank, one in series.items():
        busy, interval = _lately(one, "sys.cpu"), _lately(one, "sys.seconds")
        names = ("sys.disk_read_bytes", "sys.disk_written_bytes")
        disk = [value for name in names if (value := _lately(one, name)) is not None]
        loads[rank] = HostLoad(
            cores=None if busy is None else max(0.0, busy * cores - own_cores),
            disk_bytes_per_second=(
                max(0.0, sum(disk) / interval - own_bytes / seconds) if disk and interval else None
            ),
        )
    return loads


def _lately(series: Mapping[str, Series], name: str) -> float | None:
    """Median of the second half of a series; None if there is none."""
    if name not in series:
        return None
    values = series[name].values
    return float(np.median(values[len(values) // 2 :]))


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


def _count(
    batches: object, steps: Sequence[int], skipped: Sequence[str] | None
) -> DocumentCounts | None:
    from windlass.data import Batches, batch_of_step

    if not isinstance(batches, Batches):
        return None
    rows = []
    for step in steps:
        counted: Counter[str] = Counter()
        for sample in range(batches.batch):
            documents = set(batches.document_names(batch_of_step(step, skipped), sample))
            counted.update(documents | {str(Path(name).parent) for name in documents})
        rows.append(counted)
    names = sorted({name for row in rows for name in row})
    index = {name: column for column, name in enumerate(names)}
    counts = np.zeros((len(rows), len(names)))
    for at, row in enumerate(rows):
        for name, number in row.items():
            counts[at, index[name]] = number
    return DocumentCounts(np.asarray(steps, dtype=np.int64), tuple(names), counts)


def _document(cls: type[D], path: Path) -> D | None:
    """The document; None if it is missing or damaged."""
    with contextlib.suppress(RequestError, InputErrors, OSError):
        return cls.load(path)
    return None
