"""`windlass sweep`: searches settings with many runs, and shows what was found."""

import time
from pathlib import Path

from cyclopts import App
from rich.live import Live

from windlass import api
from windlass.api import AsJson, Names
from windlass.cli.console import (
    ProgressBars,
    console,
    print_json,
    print_line,
    print_written,
)
from windlass.report import sweep_line, sweep_table, trial_line
from windlass.stop_signals import graceful_stop
from windlass.sweep import SweepStatus, sweep_names

_SHOWN_TRIALS = 20
_DRAW_SECONDS = 1.0

app = App(name="sweep", help="Search settings with many runs, packed on this machine.")
"""`windlass sweep`, which runs one, and its command `show`."""


@app.default
def run_sweep(
    model: str | None = None,
    /,
    *overrides: str,
    name: str | None = None,
    trials: int | None = None,
    objective: Names = (),
    sampler: str | None = None,
    pruner: str | None = None,
    jobs: int | None = None,
    seed: int | None = None,
    executor: str | None = None,
    runs: Path = api.RUNS,
) -> None:
    """Search settings with many runs, packed on this machine; the same command goes on.

    For example: `windlass sweep gpt-tiny train.learning_rate=1e-4..1e-2:log train.seed=1..5
    --trials 20 --pruner median`.

    Args:
        model: A model's name, or the `.toml` file of a sweep.
        overrides: `key=value` for all runs, `key=LOW..HIGH` or `key=A,B,C` to search; after a range
            `:log` for equal ratios, `:step=16`, `:points=5` for a grid.
        name: Name of the sweep and of its group of runs; made from what is searched if not given.
        trials: Number of trials; 20, or all points of a small grid, if not given.
        objective: What to make small: `loss`, `held_out_loss`, `seconds` or another series; `max:`
            before it makes it large. May be given several times.
        sampler: `tpe`, `random` or `grid`.
        pruner: `median` or `halving` stops runs that are worse than others.
        jobs: Most runs at a time; as many as predicted memory and cores allow if not given.
        seed: Seed of the sampler.
        executor: `local`, or `slurm` through submitit.
        runs: The folder that holds the run folders.
    """
    request = api.make_sweep_request(
        model,
        *overrides,
        name=name,
        trials=trials,
        objectives=objective,
        sampler=sampler,
        pruner=pruner,
        jobs=jobs,
        seed=seed,
        executor=executor,
    )
    with graceful_stop() as stop, ProgressBars() as progress:
        view = SweepView()
        with view:
            found = api.sweep(
                request, root=runs, stop=stop, observe=view.observe, progress=progress
            )
    console.print(sweep_table(api.sweep_rows(found, most=_SHOWN_TRIALS)))
    for trial in found.best:
        print_line(f"best    {runs / trial.run}")
    more = "" if runs == api.RUNS else f" --runs {runs}"
    print_line(f"all     windlass sweep show {found.request.name}{more}")


def show_sweep(
    name: str | None = None,
    *,
    picture: Path | None = None,
    runs: Path = api.RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the trials of a sweep, the best first, and how much each key matters.

    For example: `windlass sweep show gpt-tiny-1a2b3c --picture sweep.svg`.

    Args:
        name: Name of the sweep; without one, all sweeps are listed.
        picture: Also draw its trials as parallel coordinates, with the importance of each key, to
            this .svg or .png file.
        runs: The folder that holds the run folders.
        as_json: Print the trials as JSON.
    """
    names = sweep_names(runs) if name is None else (name,)
    found = [api.load_sweep(each, root=runs) for each in names]
    if as_json:
        print_json([{"request": each.request, "trials": each.trials} for each in found])
        return
    if name is None:
        for each in found:
            print_line(sweep_line(api.sweep_rows(each)))
        return
    console.print(sweep_table(api.sweep_rows(found[0])))
    if picture is not None:
        api.draw_figure(api.draw_sweep(found[0]), picture)
    print_written(picture)


app.command(show_sweep, name="show")


class SweepView:
    """The trials on a terminal while they run; a line for each that ends elsewhere."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._drawn = 0.0
        self._told: dict[int, str] = {}

    def __enter__(self) -> None:
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def observe(self, status: SweepStatus) -> None:
        """Draws what has changed, at most once a second."""
        if time.monotonic() - self._drawn < _DRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        if self._live is not None:
            rows = api.sweep_rows(status, most=_SHOWN_TRIALS)
            self._live.start()
            self._live.update(sweep_table(rows), refresh=True)
            return
        sweep = api.sweep_rows(status)
        for row in sorted(sweep.rows, key=lambda row: row.number):
            if row.state not in ("waiting", self._told.get(row.number)):
                self._told[row.number] = row.state
                print_line(trial_line(sweep.objectives, row))
