"""`diff`: which inputs of runs differ and how, and their results in units of the noise floor."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from windlass.api.runs import RUNS
from windlass.atomic_files import atomic_write, require_output_file
from windlass.errors import RequestError
from windlass.judge import DEFAULT_PRIOR, NoiseFloor, NoisePrior, RunDiff, diff_runs, noise_floor
from windlass.record import Catalog, RunRow
from windlass.report import run_diff_page
from windlass.tracking import find_run, read_run_id

_LOSS_PRIOR = NoisePrior(0.005, 2.0)
"""Runs that differ only in their seed end with losses that differ by about half a per cent."""
_FEWEST_PEERS = 2


def diff(*names: str | Path, root: Path | str = RUNS) -> RunDiff:
    """Which inputs of runs differ and how, and how far their results are apart.

    Args:
        names: at least two runs: folder, name, the first characters of an id, or `last`.
        root: the folder that holds the run folders.

    Raises:
        RecordError: no such run, or more than one.
        RequestError: fewer than two runs are named.
    """
    if len(names) < 2:
        raise RequestError("name two runs or more to compare; `windlass runs` lists them")
    ids = [read_run_id(find_run(Path(root), str(name))) for name in names]
    with Catalog.open(Path(root)) as catalog:
        catalog.refresh()
        runs = [catalog.row(run_id) for run_id in ids]
        peers = [run for run in catalog.peers(ids[0]) if run.id not in ids[1:]]
    return diff_runs(runs, _noise_floors(runs[0], peers))


def write_run_diff(path: Path, found: RunDiff) -> None:
    """Writes what differs between runs as a self-contained HTML page.

    Raises:
        StorageError: the file cannot be written.
    """
    require_output_file(path)
    atomic_write(path, run_diff_page(found))


def _noise_floors(run: RunRow, peers: Sequence[RunRow]) -> dict[str, NoiseFloor]:
    """The noise floor of each result; of losses only where peers trained as long on the same."""
    floors = {"seconds": _floor(peers, lambda one: one.seconds, DEFAULT_PRIOR)}
    for kind in run.kinds:
        floors[f"seconds.{kind}"] = _floor(peers, partial(_kind_seconds, kind), DEFAULT_PRIOR)
    alike = [
        one
        for one in peers
        if one.step == run.step and one.inputs.get("data") == run.inputs.get("data")
    ]
    if len(alike) >= _FEWEST_PEERS:
        floors["loss"] = _floor(alike, lambda one: one.loss, _LOSS_PRIOR)
        floors["held_out_loss"] = _floor(alike, lambda one: one.held_out_loss, _LOSS_PRIOR)
    return floors


def _kind_seconds(kind: str, run: RunRow) -> float | None:
    return run.kinds.get(kind)


def _floor(
    peers: Sequence[RunRow], value: Callable[[RunRow], float | None], prior: NoisePrior
) -> NoiseFloor:
    values = [found for one in peers if (found := value(one)) is not None and found > 0]
    return noise_floor(values, prior)
