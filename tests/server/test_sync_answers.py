"""Promises about runs that other sites send to the server."""

import threading
import time
from pathlib import Path

import pytest
from served_record import HOSTILE, KNOWN, TOKEN, log_steps, make_record, make_run, serve

from windlass.errors import RecordError
from windlass.record import SyncReceiver, sync_runs
from windlass.tracking import read_series


def test_runs_arrive_byte_for_byte_and_are_sent_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make_record(here)
    there.mkdir()
    with serve(there) as served:
        first = sync_runs(here, served.url, token=TOKEN)
        again = sync_runs(here, served.url, token=TOKEN)
        assert served.ask("/api/runs?archived=all")["total"] in (0, 3)  # read a second later
    assert record_files(there) == record_files(here)
    assert (first.new_runs, again.copied_files) == (3, 0)


def test_a_wrong_token_sends_nothing(tmp_path: Path) -> None:
    make_record(tmp_path / "here")
    (tmp_path / "there").mkdir()
    refusal = pytest.raises(RecordError, match="token is missing or wrong")
    with serve(tmp_path / "there") as served, refusal:
        sync_runs(tmp_path / "here", served.url, token="wrong")  # noqa: S106
    assert record_files(tmp_path / "there") == {}


@pytest.mark.parametrize(
    "name", ["../../outside.json", "..%2f..%2foutside.json", "/etc/passwd", "journal/../../x.json"]
)
def test_a_file_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    with make_run(root) as run:
        run.end("finished")
    before = set(tmp_path.rglob("*"))
    with serve(root) as served:
        path = f"/api/sync/runs/{run.id}/files/{name}"
        for folder in ("x", "../x", HOSTILE[2]):
            status, _, body = served.send("PUT", f"{path}?folder={len(folder)}", b"x", KNOWN)
            assert status in (400, 404, 409), body
        assert served.send("GET", path, headers=KNOWN)[0] in (400, 404, 409)
    assert {one for one in tmp_path.rglob("*") if ".sqlite" not in one.name} == before


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        path = "/api/sync/runs/00000000-0000-7000-8000-000000000000/files/id?folder=x"
        headers = KNOWN | {"Content-Length": str(2**40)}
        assert served.send("PUT", path, None, headers)[0] == 413


@pytest.mark.slow
def test_fifty_runs_log_while_their_server_dies_and_all_arrives(tmp_path: Path) -> None:
    """Nobody waits for the server: runs write to their own disk, and a follower sends it."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    runs = [make_run(here, steps=0) for _ in range(50)]
    longest, stopped = 0.0, threading.Event()
    with serve(there) as served:
        port = served.port
        sync_runs(here, served.url, token=TOKEN)

    def follow() -> None:
        while not stopped.is_set():
            try:
                sync_runs(here, f"http://127.0.0.1:{port}", token=TOKEN)
            except RecordError:
                time.sleep(0.05)

    follower = threading.Thread(target=follow)
    follower.start()
    for step in range(1, 61):
        for run in runs:
            began = time.perf_counter()
            log_steps(run, [step])
            longest = max(longest, time.perf_counter() - began)
    with serve(there, port=port):
        for run in runs:
            run.end("finished")
        stopped.set()
        follower.join()
        sync_runs(here, f"http://127.0.0.1:{port}", token=TOKEN)
    assert longest < 0.05
    assert record_files(there) == record_files(here)
    assert all(len(read_series(there / run.path.name)["loss"]) == 60 for run in runs)


def test_the_receiver_is_asked_by_one_client_at_a_time(tmp_path: Path) -> None:
    """Sites that send at once leave what one after another would."""
    sites = [tmp_path / f"site{index}" for index in range(4)]
    for site in sites:
        make_record(site)
    there = tmp_path / "there"
    there.mkdir()
    with serve(there) as served:
        url = served.url
        threads = [
            threading.Thread(target=sync_runs, args=(site, url), kwargs={"token": TOKEN})
            for site in sites
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(SyncReceiver(there).runs().split(b",")) == 12
    expected = {name: content for site in sites for name, content in record_files(site).items()}
    assert record_files(there) == expected


def record_files(root: Path) -> dict[str, bytes]:
    """The content of all files of the record below a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }
