"""A process that records a run, sends it to a server and reads from it; prints what it saw.

`python syncing_client.py ROOT URL TOKEN ROWS` logs from when there is a file `go` beside ROOT.
"""

import json
import sys
import threading
import time
import urllib.request
from pathlib import Path

import windlass
from windlass.errors import RecordError

_PAUSE_SECONDS, _SYNC_SECONDS = 0.05, 0.5


def main(root: Path, url: str, token: str, rows: int) -> None:
    """Logs rows while another thread sends them, and then sends what is left."""
    stopped = threading.Event()
    waits: list[float] = []
    faults: list[str] = []
    answers = 0

    def send() -> bool:
        try:
            windlass.sync_runs(url, root=root, token=token)
        except RecordError as error:
            faults.append(str(error))
            return False
        return True

    def follow() -> None:
        nonlocal answers
        while not stopped.wait(_SYNC_SECONDS):
            answers += send() and can_read(url, token)

    with windlass.init(name=root.name, root=root) as run:
        follower = threading.Thread(target=follow)
        follower.start()
        while not (root.parent / "go").exists():
            time.sleep(_PAUSE_SECONDS)
        for step in range(1, rows + 1):
            began = _seconds_not_queued()
            run.log({"loss": 4 / step}, step=step)
            waits.append(_seconds_not_queued() - began)
            time.sleep(_PAUSE_SECONDS)
    stopped.set()
    follower.join()
    while not send():
        time.sleep(_SYNC_SECONDS)
    sys.stdout.write(json.dumps({"waits": waits, "faults": faults, "answers": answers}))


def _seconds_not_queued() -> float:
    """A clock that stands while this thread could run and all cores are taken by others.

    What is left of a call's time is what it computed and what it waited for: a lock, a disk or an
    answer. Fifty processes share the cores of this machine, which is no fault of the call.
    """
    queued = Path("/proc/thread-self/schedstat")
    if not queued.exists():  # a system that is no Linux
        return time.perf_counter()
    return time.perf_counter() - int(queued.read_text().split()[1]) / 1e9


def can_read(url: str, token: str) -> bool:
    """Whether the newest runs come as the page asks for them."""
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/api/runs?limit=20", headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310  our server
            return answer.status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
