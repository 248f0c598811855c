"""The list of runs fits a terminal, and says what differs among the runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from report.made_runs import make_record
from report.rendering import render
from windlass.integrations import init
from windlass.record import Catalog, RunRow, annotate
from windlass.report.terminal.run_tables import record_table
from windlass.report.terminal.runs_table import columns_table, runs_table
from windlass.tracking import RunRecord, load_run

NOW = 2e9


def rows(root: Path) -> list[RunRow]:
    with Catalog.open(root) as catalog:
        catalog.refresh()
        return catalog.rows()


def test_the_list_of_runs_fits_in_80_columns(record: Callable[..., RunRecord]):
    for state in ("finished", "interrupted", "broken"):
        run = record(count=30, state=state)
    lines = render(runs_table(rows(run.folder.parent), NOW)).splitlines()
    assert max(map(len, lines)) <= 80
    assert all("gpt-tiny" in line for line in lines[-4:-1])


@pytest.mark.parametrize(("width", "kept"), [(80, ("held out", "step")), (60, ("step",)), (44, ())])
def test_a_narrow_list_leaves_numbers_out_and_cuts_none(
    tmp_path: Path, width: int, kept: tuple[str, ...]
):
    make_record(tmp_path, count=20)
    (row,) = rows(tmp_path)
    lines = render(runs_table([replace(row, state="interrupted")], NOW), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for name in ("run", "model", "state", "loss", *kept):
        assert name in lines[1]


def test_a_long_name_of_a_model_is_cut_and_nothing_else(tmp_path: Path):
    make_record(tmp_path, count=20)
    (row,) = rows(tmp_path)
    long = (replace(row, model="hf:/home/somebody/models/my-llama"), replace(row, model="m" * 40))
    for width in (60, 80):
        lines = render(runs_table(long, NOW), width).splitlines()
        assert max(map(len, lines)) <= width
        assert all(row.short_id in line for line in lines[3:5])
        assert "llama  " in lines[3]
        assert "".join(lines).count("…") == len(long)


def test_the_list_of_runs_says_what_differs_among_them(tmp_path: Path):
    for count in (20, 20, 30):
        make_record(tmp_path, count=count)
    runs = rows(tmp_path)
    newest, *others = render(runs_table(runs, NOW), 100).splitlines()[3:6]
    assert newest.rstrip().endswith("steps=30")
    assert all("steps=" not in line for line in others)
    assert f"{runs[0].short_id}  steps=30" in render(runs_table(runs, NOW), 80)
    assert "differs" not in render(runs_table(runs[1:], NOW), 100)


def test_a_loop_of_the_users_own_shows_what_it_logs_first_and_lacks_no_settings(tmp_path: Path):
    planned = make_record(tmp_path, count=3)
    (planned.folder / "plan.toml").write_text("[batch]\nsequence = 8\n")
    for rate in (0.1, 0.2):
        with init(config={"rate": rate}, name="mine", root=tmp_path) as run:
            run.log({"accuracy": 0.25, "reward": 3.0})
    text = render(runs_table(rows(tmp_path), NOW), 140)
    assert text.count("accuracy 0.250") == 2
    assert "rate=0." in text
    assert "not finite" not in text
    assert " no " not in text
    assert "0.25 → 0.25" in render(record_table(load_run(run.folder)))


def test_tags_marks_and_faults_are_among_what_differs(tmp_path: Path):
    run = make_record(tmp_path, count=3)
    annotate(run.folder, tags=["kept"], broken=True)
    (run.folder / "plan.toml").write_text("")
    (row,) = rows(tmp_path)
    text = render(runs_table([replace(row, verdict="slow")], NOW), 140)
    for words in ("verdict slow", "marked broken", "fault", "#kept"):
        assert words in text


def test_a_ratio_outside_the_interval_is_coloured(tmp_path: Path):
    make_record(tmp_path, count=20)
    (row,) = rows(tmp_path)
    assert row.seconds is not None
    inside = replace(row, low_seconds=0.9 * row.seconds, high_seconds=1.1 * row.seconds)
    outside = replace(row, low_seconds=0.5 * row.seconds, high_seconds=0.9 * row.seconds)
    assert [one.outside_interval for one in (row, inside, outside)] == [False, False, True]


def test_a_long_list_of_differences_stands_below(tmp_path: Path):
    for _ in range(3):
        make_record(tmp_path, count=3)
    newest, *others = rows(tmp_path)
    settings = {f"train.setting_{number}": number for number in range(12)}
    settings = dict(newest.settings) | settings
    text = render(runs_table([replace(newest, settings=settings), *others], NOW), 120)
    assert "what differs" in [line.strip() for line in text.splitlines()]


def test_a_name_that_a_run_was_given_is_shown(tmp_path: Path):
    make_record(tmp_path, count=3)
    (row,) = rows(tmp_path)
    assert row.name == row.folder.name
    assert "differs" not in render(runs_table([row], NOW), 120)
    assert "baseline" in render(runs_table([replace(row, name="baseline")], NOW), 120)


def test_names_with_markup_are_shown_as_they_are(record: Callable[..., RunRecord]):
    run = record(count=1, name="[bold]x[/]")
    assert "[bold]x[/]" in render(runs_table(rows(run.folder.parent), NOW), 120)


def test_columns_that_a_user_chose_are_in_their_units():
    names = ("model", "seconds", "memory_bytes", "started", "train.batch", "compile", "tags")
    values = ("gpt", 0.25, 2**30, 0.0, 16, True, ("a", "b"))
    text = render(columns_table(names, [values, (None,) * len(names)]), 120)
    for words in ("250 ms", "1.00 GiB", "1970-01-01 00:00", " 16 ", "true", "a, b", "–"):
        assert words in text
