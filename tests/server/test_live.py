"""Promises about what a page hears while runs go on."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from served_record import KNOWN, Served, log_steps, make_run, serve

from windlass.record import Catalog, annotate
from windlass.server import change_feed
from windlass.server.change_feed import ChangeFeed
from windlass.tracking import reopen_run_folder


def test_new_points_are_sent_and_old_ones_are_not(tmp_path: Path) -> None:
    with make_run(tmp_path, steps=5) as run, serve(tmp_path) as served:
        path = f"/api/live?ids={run.id}&after=3&names=loss,none&since={version_of(served)}"
        with stream(served, path) as events:
            assert next(events) == ("points", points(run.id, [4, 5]))
            log_steps(run, [6, 7])
            grown = next(event for event in events if event[0] == "points")
        assert grown == ("points", points(run.id, [6, 7]))


def test_a_later_attempt_says_that_curves_begin_anew(tmp_path: Path) -> None:
    with make_run(tmp_path, steps=5) as run:
        pass
    with serve(tmp_path) as served:
        path = f"/api/live?ids={run.id}&after=5&names=loss&since={version_of(served)}"
        with stream(served, path) as events:
            time.sleep(1.5)  # the stream has seen the attempts that there are
            with reopen_run_folder(run.path, meta={"model": "gpt-tiny"}) as again:
                time.sleep(1.5)  # it has done no step yet, and so replaces none
                log_steps(again, [4], 1.0)
                found = next(event for event in events if event[0] == "points")
                curves = served.ask(f"/api/curves?ids={run.id}&names=loss")["curves"][run.id]
                log_steps(again, [5], 1.0)
                grown = next(event for event in events if event[0] == "points")
    assert found[1]["restarted"]
    assert curves["loss"]["steps"] == [1, 2, 3, 4]
    assert curves["loss"]["median"][-1] == 4 / 4 + 1.0
    assert grown == ("points", points(run.id, [5], 1.0))


def test_changed_runs_are_named(tmp_path: Path) -> None:
    with make_run(tmp_path) as run, make_run(tmp_path), serve(tmp_path) as served:
        version = served.ask("/api/runs")["version"]
        with stream(served, f"/api/live?since={version}") as events:
            annotate(run.path, tags=["seen"])
            assert next(events) == ("runs", {"version": version + 1, "ids": [run.id]})


def test_a_stream_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with make_run(tmp_path), serve(tmp_path) as served:
        for query, status in (("ids=none&after=1", 404), ("ids=a", 400), ("since=x", 400)):
            assert served.send("GET", f"/api/live?{query}", headers=KNOWN)[0] == status


def test_a_page_of_an_earlier_server_hears_of_all_runs(tmp_path: Path) -> None:
    with make_run(tmp_path, steps=5) as run:
        with serve(tmp_path) as served:
            version = version_of(served)
        log_steps(run, [6])
        with serve(tmp_path) as served, stream(served, f"/api/live?since={version}") as events:
            assert next(events)[1]["ids"] == [run.id]


def version_of(served: Served) -> int:
    return int(served.ask("/api/runs")["version"])


def points(run: str, steps: list[int], offset: float = 0.0) -> dict[str, Any]:
    losses = [4 / step + offset for step in steps]
    return {"id": run, "restarted": False, "series": {"loss": [steps, losses]}}


@contextmanager
def stream(served: Served, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a stream: names and values."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)) as client:
        client.request("GET", path, headers=KNOWN)
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        with closing(answer):
            yield events_of(answer)


def events_of(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer:
        key, _, value = line.decode().rstrip("\n").partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def test_a_feed_that_nobody_looks_at_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "_LOOKED_SECONDS", 0.0)
    with Catalog.open(tmp_path) as catalog, ExitStack() as stack:
        stack.enter_context(ChangeFeed(catalog))
        time.sleep(0.1)  # it pauses before it asks whether somebody looks
        ending = threading.Thread(target=stack.close, daemon=True)
        ending.start()
        ending.join(5)
        assert not ending.is_alive()
