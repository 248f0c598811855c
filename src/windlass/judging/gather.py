"""Gathers the evidence on a run: its journals as they are now, beside its history and its data."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from windlass.errors import WindlassError
from windlass.jobs import prepare_data
from windlass.judge import DocumentCounts, Evidence, HostLoad
from windlass.judging.history import History, curve_of, curves_of, most_targets, rank_times
from windlass.schema import DEVICE_TIER, Plan, RunState
from windlass.tracking import Series, journal_ranks, load_run, read_series
from windlass.training import load_run_tokens, make_batches, planned_from_record

_DATA_STEPS = 1000
"""Steps whose documents are looked up at most, the last ones."""


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
        reason: why the run ended, if it ended badly.
        documents: from `document_counts`, if a loss is known to be wrong.
    """
    series = {rank: read_series(folder, rank) for rank in journal_ranks(folder)}
    first = series.get(0, {})
    return Evidence(
        state=state,
        reason=reason,
        seconds=curve_of(first, "seconds"),
        curves=curves_of(first),
        ranks={rank: rank_times(rank, one, history.plan) for rank, one in series.items() if one},
        peers=history.peers,
        prior=history.prior,
        predicted=history.predicted,
        residuals=history.residuals,
        tiers=_tiers(history.plan),
        sizes=_sizes(history.plan),
        differences=history.differences,
        load=_host_loads(history.cores, series),
        targets=most_targets(first),
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
