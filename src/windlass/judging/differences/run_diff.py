"""`diff`: which inputs of runs differ and how, and their results in units of the noise floor."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.text import Text

from windlass.answer import Shown
from windlass.atomic_files import atomic_write, require_output_file
from windlass.errors import RequestError
from windlass.flags import AnyPath, RunsFolder, Written
from windlass.jobs import RUNS
from windlass.judge import DEFAULT_PRIOR, NoiseFloor, NoisePrior, RunDiff, diff_runs, noise_floor
from windlass.record import Catalog, RunRow
from windlass.report import run_diff_page, run_diff_table
from windlass.tracking import find_run, read_run_id

_CODE_LINES = 60
"""Lines of a diff of the code that are printed; the page has all of them."""
_LINE_COLORS = {"+": "green", "-": "red", "@": "cyan"}
_LOSS_PRIOR = NoisePrior(0.005, 2.0)
"""Runs that differ only in their seed end with losses that differ by about half a per cent."""
_FEWEST_PEERS = 2


class ShownDiff(Shown[RunDiff]):
    """What differs between runs."""

    def lines(self) -> Iterator[RenderableType]:
        """The inputs and results that differ, and the first lines of the code that do."""
        code = self.value.code
        yield run_diff_table(self.value)
        for line in code[:_CODE_LINES]:
            yield Text(line, style=_LINE_COLORS.get(line[:1], ""))
        if len(code) > _CODE_LINES:
            yield f"... {len(code) - _CODE_LINES} more lines; `--page` writes all of them"


def diff(
    *names: AnyPath, root: RunsFolder = RUNS, page: Written = None
) -> Annotated[RunDiff, ShownDiff]:
    """Show which inputs of runs differ, and how far their results are apart.

    For example: `windlass diff last~1 last`, or `windlass diff 1a2b3c 4d5e6f --page diff.html`.

    Args:
        names: Two or more runs: folder, name, the first characters of an id, or `last`.
        root: The folder that holds the run folders.
        page: Also write a self-contained HTML page to this file.

    Raises:
        RecordError: no such run, or more than one.
        RequestError: fewer than two runs are named.
        StorageError: the page cannot be written.
    """
    if len(names) < 2:
        raise RequestError("name two runs or more to compare; `windlass runs` lists them")
    ids = [read_run_id(find_run(Path(root), str(name))) for name in names]
    with Catalog.open(Path(root)) as catalog:
        catalog.refresh()
        runs = [catalog.row(run_id) for run_id in ids]
        peers = [run for run in catalog.peers(ids[0]) if run.id not in ids[1:]]
    found = diff_runs(runs, _noise_floors(runs[0], peers))
    if page is not None:
        require_output_file(page)
        atomic_write(page, run_diff_page(found))
    return found


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
