"""Promises about what the API says of runs."""

import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from served_record import HOSTILE, KNOWN, Served, make_record, make_run, serve

from windlass.record import Catalog, RunQuery
from windlass.tracking import read_series


def test_the_table_has_what_the_catalogue_has(served: Served) -> None:
    with Catalog.open(served.root) as catalog:
        catalog.refresh()
        expected = catalog.rows(RunQuery(sort="loss"))
    table = served.ask("/api/runs?columns=id,name,loss,tags,train.learning_rate&sort=loss")
    rows = [
        [r.id, r.name, r.loss, list(r.tags), r.settings["train.learning_rate"]] for r in expected
    ]
    assert table["rows"] == rows
    assert table["total"] == 3


def test_a_filter_picks_runs_and_pages_join(served: Served) -> None:
    wanted = quote("train.learning_rate > 1.5e-3 and held_out_loss is not null")
    table = served.ask(f"/api/runs?filter={wanted}&columns=id")
    pages = [
        served.ask(f"/api/runs?filter={wanted}&columns=id&limit=1&offset={n}") for n in range(2)
    ]
    assert [row for page in pages for row in page["rows"]] == table["rows"]
    assert table["total"] == pages[0]["total"] == 2


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("filter=los%20%3C%205", "did you mean `loss`"),
        ("filter=loss%20%3C", "the filter ends"),
        ("columns=nothing.at.all", "nothing.at.all"),
        ("sort=nothing.at.all", "nothing.at.all"),
        ("limit=ten", "`limit` should be a number"),
        ("archived=perhaps", "no, yes, all"),
    ],
)
def test_a_wrong_question_is_answered_in_a_sentence(served: Served, query: str, words: str) -> None:
    status, headers, body = served.send("GET", f"/api/runs?{query}", headers=KNOWN)
    assert status == 400
    assert words in body.decode()
    assert headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "run", ["none", "..%2f..%2fetc%2fpasswd", "%00", "../../etc/passwd", quote(HOSTILE[0], safe="")]
)
def test_what_is_no_run_names_no_file(served: Served, run: str) -> None:
    for path in (f"/api/runs/{run}", f"/api/runs/{run}/inputs", f"/api/curves?ids={run}"):
        assert served.send("GET", path, headers=KNOWN)[0] == 404


def test_curves_are_those_of_the_journal(served: Served) -> None:
    ids = served.ids()
    answer = served.ask(f"/api/curves?ids={','.join(ids)}&names=loss,seconds,none")["curves"]
    with Catalog.open(served.root) as catalog:
        folders = {run: catalog.row(run).folder for run in ids}
    for run in ids:
        series = read_series(folders[run])
        assert set(answer[run]) == {"loss", "seconds"}
        for name, curve in answer[run].items():
            values = np.array([np.nan if v is None else v for v in curve["median"]], np.float32)
            assert curve["steps"] == series[name].steps.tolist()
            np.testing.assert_array_equal(values, series[name].values.astype(np.float32))
    assert answer[ids[2]]["loss"]["median"][-1] is None


def test_a_run_stands_beside_its_prediction(served: Served) -> None:
    run = served.ask(f"/api/runs/{served.ids()[0]}")
    assert run["prediction"]["by_kind"] == {"forward": 0.15, "backward": 0.25}
    assert run["kinds"] == pytest.approx({"forward": 0.152, "backward": 0.228})
    assert run["colours"] == {"forward": "blue", "backward": "red"}
    assert run["series"]["loss"]["count"] == 40


def test_events_inputs_and_timeline_are_answered(served: Served) -> None:
    place = f"/api/runs/{served.ids()[0]}"
    events = served.ask(f"{place}/events")["events"]
    inputs = served.ask(f"{place}/inputs")["inputs"]
    timeline = served.ask(f"{place}/timeline")
    held_out = [event["step"] for event in events if event["event"] == "evaluation"]
    assert held_out == [20, 40]
    assert [(one["input"], one["file"]) for one in inputs] == [("request", "request.toml")]
    assert [kind["name"] for kind in timeline["kinds"]] == ["forward", "backward", "update"]
    assert timeline["lanes"][0]["ends"] == [0.1, 0.3, 0.4]


def test_differences_name_the_key_that_differs(served: Served) -> None:
    first, second, _ = served.ids()
    diff = served.ask(f"/api/diff?a={first}&b={second}")
    assert [(one["key"], one["values"]) for one in diff["keys"]] == [
        ("train.learning_rate", ["0.001", "0.002"])
    ]
    assert diff["inputs"]["request"] == "different"
    assert served.send("GET", f"/api/diff?a={first}", headers=KNOWN)[0] == 400


def test_a_verdict_is_answered(served: Served) -> None:
    verdict = served.ask(f"/api/runs/{served.ids()[2]}/verdict")
    assert (verdict["level"], verdict["since_step"]) == ("broken", 41)


def test_annotations_are_written_to_the_run_and_seen_at_once(tmp_path: Path) -> None:
    make_record(tmp_path)
    with serve(tmp_path) as served:
        run = served.ids()[0]
        place = f"/api/runs/{run}/annotations"
        change = {"tags": ["good", HOSTILE[2]], "note": "first\nsecond", "archived": True}
        status, body = served.post(place, change)
        assert status == 200
        assert json.loads(body)["notes"] == ["first\nsecond"]
        assert served.post(place, {"remove": ["good"]})[0] == 200
        assert served.ask("/api/runs")["total"] == 2
        archived = served.ask("/api/runs?archived=yes&columns=id,tags")
        assert archived["rows"] == [[run, [HOSTILE[2]]]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "nothing to note"),
        ({"tags": "good"}, "`tags` should be a list of texts"),
        ({"archived": 1}, "`archived` should be true or false"),
        ({"change_id": "../../x"}, "`change_id` is no change"),
        ({"note": "x" * 30_000}, "30000 characters"),
    ],
)
def test_a_wrong_annotation_is_refused(
    served: Served, change: dict[str, object], words: str
) -> None:
    status, body = served.post(f"/api/runs/{served.ids()[0]}/annotations", change)
    assert status == 400
    assert words in body.decode()


def test_a_new_run_appears_without_a_new_start(tmp_path: Path) -> None:
    make_record(tmp_path)
    with serve(tmp_path) as served:
        assert served.ask("/api/runs")["total"] == 3
        make_run(tmp_path).close()
        served.post(f"/api/runs/{served.ids()[0]}/annotations", {"tags": ["x"]})
        assert served.ask("/api/runs")["total"] == 4


def test_the_settings_that_tell_the_runs_of_a_sweep_apart_are_columns(tmp_path: Path) -> None:
    for index in range(4):
        with make_run(tmp_path, name="other", rate=1e-3, group=None) as run:
            run.end("finished")
        name = f"gpt-tiny-1a2b3c-{index:04}"
        with make_run(tmp_path, name=name, rate=1e-3 * (index + 1), group="gpt-tiny-1a2b3c") as run:
            run.end("finished")
    with serve(tmp_path) as served:
        table = served.ask("/api/runs?columns=name,differing,loss&sort=name")
        others = served.ask("/api/runs?columns=name,differing&filter=name%20%3D%20%22other%22")
    assert table["differing"] == ["train.learning_rate"]
    assert [column["name"] for column in table["columns"]] == ["name", *table["differing"], "loss"]
    assert [row[1] for row in table["rows"][:4]] == [0.001, 0.002, 0.003, 0.004]
    assert others["differing"] == []
