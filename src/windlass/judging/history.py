"""History: the plan, the prediction and the peers of a run, which do not change while it trains."""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from windlass.document import Document
from windlass.errors import InputErrors, RequestError
from windlass.judge import (
    DEFAULT_PRIOR,
    Curve,
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
    ENVIRONMENT_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    Environment,
    Machine,
    Parallelism,
    Plan,
    Prediction,
)
from windlass.tracking import Series, journal_ranks, read_run_id, read_series

D = TypeVar("D", bound=Document)
_GroupKey = tuple[str | None, ...]
_PEERS_WITH_CURVES, _PEERS_WITH_RANKS = 20, 5
"""Newest peers whose series are read, and those of all ranks: a run may have hundreds of peers."""
_PRIOR_INPUTS = ("graph", "plan", "machine")
_FEWEST_STEPS = 20
"""A run with fewer steps is nobody's peer."""
_OWN_KEYS = ("train.seed",)
"""Settings that like runs differ in."""


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
        root: the folder that holds the run folders; a run that lies elsewhere has no peers.

    Raises:
        RecordError: `folder` holds no run.
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
        times = rank_times(rank, read_series(row.folder, rank) if rank else first, plan)
        levels[rank] = {kind: float(np.median(v)) for kind, v in times.kinds.items()}
        if times.cpu_seconds is not None:
            cpu[rank] = float(np.median(times.cpu_seconds))
    return Peer(
        seconds=seconds,
        comparable=comparable,
        curves=curves_of(first),
        stalls=stall_share(curve_of(first, "seconds").values),
        kinds=levels,
        cpu_seconds=cpu,
    )


def _group_key(row: RunRow) -> _GroupKey:
    return tuple(row.inputs.get(name) for name in _PRIOR_INPUTS)


def _predicted(prediction: Prediction | None) -> PredictedTime | None:
    if prediction is None:
        return None
    return PredictedTime(prediction.step_seconds, prediction.low_seconds, prediction.high_seconds)


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


def _document(cls: type[D], path: Path) -> D | None:
    """The document; None if it is missing or damaged."""
    with contextlib.suppress(RequestError, InputErrors, OSError):
        return cls.load(path)
    return None


_CURVES = ("loss", "gradient_norm", "learning_rate")
_KIND_PREFIX, _ARRIVAL_PREFIX = "seconds.", "arrival."


def curves_of(series: Mapping[str, Series]) -> dict[str, Curve]:
    """The curves of a run, without the norms of steps that a scaled loss made it skip."""
    curves = {name: curve_of(series, name) for name in _CURVES if name in series}
    if "loss_scale" in series and "gradient_norm" in curves:
        norms = curves["gradient_norm"]
        kept = np.isfinite(norms.values)
        curves["gradient_norm"] = Curve(norms.steps[kept], norms.values[kept])
    return curves


def curve_of(series: Mapping[str, Series], name: str) -> Curve:
    """A series by its name; it has no step if the run has none of that name."""
    if name not in series:
        return Curve(np.empty(0, dtype=np.int64), np.empty(0))
    return Curve(series[name].steps, series[name].values)


def rank_times(rank: int, series: Mapping[str, Series], plan: Plan | None) -> RankTimes:
    """The times of one rank; a step without a kind of instruction took no time for it."""
    steps = curve_of(series, "seconds").steps

    def aligned(one: Series) -> npt.NDArray[np.float64]:
        values = np.zeros(len(steps))
        values[np.isin(steps, one.steps)] = one.values[np.isin(one.steps, steps)]
        return values

    def of_prefix(prefix: str) -> dict[str, npt.NDArray[np.float64]]:
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


def most_targets(series: Mapping[str, Series]) -> int | None:
    """Targets of a step, at most: its tokens, or its examples; None if they were not recorded."""
    tokens = curve_of(series, "tokens").values
    return int(tokens.max()) if len(tokens) else None
