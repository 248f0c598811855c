"""`windlass runs`: lists runs, finds them by a filter, tags them, and exports them.

What it needs is imported here, not the whole interface: a list is there within half a second.
"""

import socket
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from windlass.api import AsJson, Flag, Names
from windlass.atomic_files import require_output_file
from windlass.cli.console import ProgressBars, console, print_json, print_line, print_written
from windlass.errors import RequestError
from windlass.record import RUNS, Annotations, Catalog, RunQueries, RunQuery, annotate
from windlass.report import columns_table, runs_table
from windlass.tracking import describe_other_formats, find_run

Filter = Annotated[str | None, Parameter(name="FILTER")]
"""A condition on runs; None is all that are not archived."""
Words = Annotated[tuple[str, ...], Parameter(negative="")]
"""An option that may be given several times."""
_SHOWN_RUNS = 40

app = App(name="runs")
"""`windlass runs`, which lists, and its commands `tag`, `note`, `archive` and others."""


@app.default
def list_runs(
    condition: Filter = None,
    /,
    *,
    sort: str = "id desc",
    columns: Names = (),
    limit: int = _SHOWN_RUNS,
    group: str | None = None,
    archived: Flag = False,
    runs: str = str(RUNS),
    as_json: AsJson = False,
) -> None:
    """List runs, newest first, or those that a filter picks.

    For example: `windlass runs 'model = "gpt-tiny" and loss < 5' --sort seconds`. A filter compares
    columns, settings (`train.learning_rate = 1e-3`), series (`max(gradient_norm) > 10`) and tags
    (`tag = "good"`) by =, !=, <, <=, >, >=, `in (...)`, `like "gpt%"` and `is null`, joined by
    `and`, `or`, `not` and parentheses.

    Args:
        condition: The filter; all runs that are not archived if not given.
        sort: A column, setting or series; `--sort 'loss desc'` begins with the largest.
        columns: Columns, settings and series to show, with commas between them.
        limit: Most runs to list; 0 lists all.
        group: Only runs of this group, such as a sweep.
        archived: Only archived runs.
        runs: The folder that holds the run folders, or the URL of a team's PostgreSQL.
        as_json: Print the runs as JSON.
    """
    query = RunQuery(
        filter=_with_group(condition, group), sort=sort, limit=limit or None, archived=archived
    )
    with ProgressBars() as progress, _catalog(runs) as catalog:
        catalog.refresh(progress)
        count, others = catalog.count(query), catalog.unread_folders()
        hidden = 0 if count else catalog.count(RunQuery(archived=True))
        if columns:
            values = catalog.table(columns, query)
            if as_json:
                print_json([dict(zip(columns, row, strict=True)) for row in values])
            else:
                console.print(columns_table(columns, values))
        else:
            rows = catalog.rows(query)
            if as_json:
                print_json(rows)
            elif rows:
                console.print(runs_table(rows, time.time()))
    if as_json:
        return
    _print_remarks(catalog.place, count, hidden, query)
    if others and (sentence := describe_other_formats(Path(runs))):
        print_line(sentence)


def tag(run: str, /, *tags: str, remove: Words = (), runs: Path = RUNS) -> None:
    """Give a run tags, or take some away.

    For example: `windlass runs tag last good-curve --remove candidate`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        tags: Words to find the run by.
        remove: A tag to take away; may be given several times.
        runs: The folder that holds the run folders.
    """
    if not tags and not remove:
        raise RequestError("name a tag, such as `windlass runs tag last good`")
    folder = find_run(runs, run)
    _print_annotations(folder, annotate(folder, tags=tags, remove=remove))


def note(run: str, text: str, /, *, runs: Path = RUNS) -> None:
    """Add a note to a run; earlier notes stay.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        text: The note.
        runs: The folder that holds the run folders.
    """
    folder = find_run(runs, run)
    _print_annotations(folder, annotate(folder, note=text))


def archive(*names: str, undo: Flag = False, runs: Path = RUNS) -> None:
    """Leave runs out of lists from now on; nothing is deleted.

    Args:
        names: Folders, names or the first characters of ids.
        undo: List them again.
        runs: The folder that holds the run folders.
    """
    for folder in _folders(names, runs):
        _print_annotations(folder, annotate(folder, archived=not undo))


def mark_broken(
    *names: str, undo: Flag = False, note: str | None = None, runs: Path = RUNS
) -> None:
    """Mark runs as no example for others, so that no verdict compares a run with them.

    Args:
        names: Folders, names or the first characters of ids.
        undo: Take the mark away.
        note: Why.
        runs: The folder that holds the run folders.
    """
    for folder in _folders(names, runs):
        _print_annotations(folder, annotate(folder, broken=not undo, note=note))


def export(
    target: Path,
    condition: Filter = None,
    /,
    *,
    archived: Flag = False,
    runs: Path = RUNS,
) -> None:
    """Write runs and all their steps as Parquet files, or a table of runs as CSV.

    For example: `windlass runs export analysis 'model = "gpt-tiny"'` writes `runs.parquet` and
    `steps.parquet` into `analysis`, and `windlass runs export runs.csv` a table.

    Args:
        target: A folder, or a `.csv` file.
        condition: A filter as of `windlass runs`; all runs that are not archived if not given.
        archived: Only archived runs.
        runs: The folder that holds the run folders.
    """
    from windlass.record import export_csv, export_parquet

    with ProgressBars() as progress, Catalog.open(runs) as catalog:
        catalog.refresh(progress)
        rows = catalog.rows(RunQuery(filter=condition, archived=archived))
        if target.suffix == ".csv":
            require_output_file(target)
            export_csv(rows, target)
            written: tuple[Path, ...] = (target,)
        else:
            written = export_parquet(rows, target, progress)
    print_written(*written)


def publish(url: str, /, *, site: str | None = None, runs: Path = RUNS) -> None:
    """Publish the runs here to the PostgreSQL catalogue of a team.

    For example: `windlass runs publish postgresql://record@db.example.org/runs --site alpha`; then
    `windlass runs --runs postgresql://...` lists the runs of all sites.

    Args:
        url: The database; a password is better kept in `~/.pgpass`.
        site: The name of this folder of runs among all that are published; this host's if not
            given.
        runs: The folder that holds the run folders.
    """
    from windlass.record import TeamCatalog

    with ProgressBars() as progress, TeamCatalog(url) as catalog:
        count = catalog.publish(runs, site=site or socket.gethostname(), progress=progress)
    print_line(f"published {count} run{'' if count == 1 else 's'} to {catalog.place}")


app.command(tag)
app.command(note)
app.command(archive)
app.command(mark_broken, name="mark-broken")
app.command(export)
app.command(publish)


def _catalog(place: str) -> RunQueries:
    """The catalogue of a folder, or that of a team by its URL."""
    if "://" not in place:
        return Catalog.open(place)
    from windlass.record import TeamCatalog

    return TeamCatalog(place)


def _with_group(condition: str | None, group: str | None) -> str | None:
    """The filter for one group only."""
    if group is None:
        return condition
    quoted = group.replace('"', '""')
    return f'group = "{quoted}"' + (f" and ({condition})" if condition else "")


def _folders(names: tuple[str, ...], root: Path) -> list[Path]:
    if not names:
        raise RequestError("name a run; `windlass runs` lists them")
    return [find_run(root, name) for name in names]


def _print_annotations(folder: Path, annotations: Annotations) -> None:
    words = [f"#{tag}" for tag in annotations.tags]
    words += ["archived"] * annotations.archived + ["marked broken"] * annotations.broken
    words += [f"{len(annotations.notes)} notes"] * bool(annotations.notes)
    print_line(f"{folder.name}: {', '.join(words) or 'no tags'}")


def _print_remarks(place: str, count: int, hidden: int, query: RunQuery) -> None:
    """What the list leaves out, and why.

    Args:
        place: where the runs are.
        count: how many the query asks for.
        hidden: how many are archived, where it asks for none.
        query: what was asked for.
    """
    if query.limit is not None and count > query.limit:
        print_line(f"the first {query.limit} of {count} runs; `--limit 0` lists all")
    if count == 0 and query.filter is not None:
        print_line(f"no run in {place} matches the filter")
    elif count == 0 and hidden and not query.archived:
        print_line(f"all {hidden} runs in {place} are archived; `--archived` lists them")
    elif count == 0:
        print_line(f"no runs in {place} yet; start one with `windlass train`")
