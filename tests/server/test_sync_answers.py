"""Promises about runs that other sites send to the server."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from served_record import HOSTILE, KNOWN, TOKEN, make_record, make_run, serve

from windlass.errors import RecordError
from windlass.record import SyncReceiver, sync_runs
from windlass.server import Access, listen
from windlass.tracking import FolderLock, read_series

CLIENTS, ROWS, OUTAGES = 50, 300, 3
LARGE = 2**26
"""Bytes of a file; two chunks of 16 MiB are in memory while it is copied, and as much again of it
before they are freed."""


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


def test_a_run_that_a_server_refuses_keeps_no_other_from_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make_record(here)
    first = min(here.iterdir())
    shutil.copytree(first, there / first.name)
    (there / first.name / "plan.toml").write_text("here only")
    (first / "plan.toml").write_text("there only")
    last = max(here.iterdir())
    access = Access(token=TOKEN, upload_bytes=2**20)
    (last / "graph.json").write_bytes(bytes(2**21))
    lock = FolderLock(there / first.name / ".lock")
    try:
        with serve(there, access=access) as served:
            report = sync_runs(here, served.url, token=TOKEN)
    finally:
        lock.release()
    assert report.new_runs == 1
    assert sorted("is being written here" in text for text in report.warnings) == [False, True]
    assert any("larger than 1048576 bytes" in text for text in report.warnings)
    assert len(list(there.glob("*/id"))) == 2


def test_a_large_file_arrives_without_being_in_memory(tmp_path: Path) -> None:
    with make_run(tmp_path / "here") as run:
        run.end("finished")
    layer = run.path / "checkpoints" / "step-3" / "layer-0000.safetensors"
    layer.parent.mkdir(parents=True)
    layer.write_bytes(b"a")
    os.truncate(layer, LARGE)
    with serve(tmp_path / "there") as served:
        tracemalloc.start()
        try:
            sync_runs(tmp_path / "here", served.url, token=TOKEN, checkpoints=True)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        again = sync_runs(tmp_path / "here", served.url, token=TOKEN, checkpoints=True)
    assert record_files(tmp_path / "there") == record_files(tmp_path / "here")
    assert again.copied_files == 0
    assert peak < LARGE * 3 / 4


@pytest.mark.slow
def test_fifty_processes_log_while_their_server_is_killed_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """Nobody waits for the server: a run writes to its own disk, and is sent after.

    A call may take 50 ms, without what it stands in line for a core; an outage lasts a second.
    """
    there, token = tmp_path / "there", tmp_path / "token"
    there.mkdir()
    token.write_text(TOKEN)
    with closing(listen("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--port", str(port), "--token-file", str(token))
    serving = (sys.executable, "-m", "windlass", "serve", str(there), *options)
    program, url = Path(__file__).with_name("syncing_client.py"), f"http://127.0.0.1:{port}"
    roots = [tmp_path / f"site-{number}" for number in range(CLIENTS)]
    clients = [
        subprocess.Popen(
            (sys.executable, str(program), str(root), url, TOKEN, str(ROWS)),
            stdout=subprocess.PIPE,
        )
        for root in roots
    ]
    server = subprocess.Popen(serving)
    while not all(any(root.glob("*/journal/*")) for root in roots):
        time.sleep(0.1)
    (tmp_path / "go").touch()
    for _ in range(OUTAGES):
        time.sleep(3)
        server.kill()
        server.wait()
        time.sleep(1)
        server = subprocess.Popen(serving)
    said = [json.loads(client.communicate(timeout=300)[0]) for client in clients]
    server.kill()
    server.wait()
    assert record_files(there) == {k: v for root in roots for k, v in record_files(root).items()}
    assert [len(read_series(run.parent)["loss"]) for run in there.glob("*/id")] == [ROWS] * CLIENTS
    assert all("does not answer" in fault for client in said for fault in client["faults"])
    assert all(client["answers"] > 0 for client in said)
    assert max(max(client["waits"]) for client in said) < 0.05


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
