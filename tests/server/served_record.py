"""Records with hostile texts, and a server for them on a free port."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.judging.differences.run_diff import diff
from windlass.judging.verdicts import judge
from windlass.record import Catalog, annotate
from windlass.schema import Step
from windlass.server import (
    LOOPBACK_NAMES,
    Access,
    Analyses,
    RecordServer,
    listen,
    serve_app,
)
from windlass.tracking import RunFolder, create_run_folder

TOKEN = "a-token-of-the-tests-0123456789"  # noqa: S105
HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    "=cmd|' /C calc'!A0",
    "\u202egnp.exe ]]> {{7*7}} `${document.title='pwned'}`",
)
PREDICTION = {
    "plan": "one device", "machine": "here", "step_seconds": 0.4, "low_seconds": 0.3,
    "high_seconds": 0.5, "by_term": {"matmul": 0.3, "traffic": 0.1},
    "by_kind": {"forward": 0.15, "backward": 0.25}, "tokens_per_step": 512, "model_flop": 1e9,
    "peak_flop_rate": 1e11,
    "peaks": [
        {"tier": "device", "capacity_bytes": 2**31, "peak_bytes": 2**30, "instruction": 1,
         "by_class": {"weights": 2**29, "gradients": 2**28, "activations": 2**28}}
    ],
}  # fmt: skip
TIMELINE = {
    "predicted": True,
    "devices": [
        {"device": 0, "kinds": ["forward", "backward", "update"], "layers": [0, 0, None],
         "micro_batches": [0, 0, None], "starts": [0.0, 0.1, 0.3], "ends": [0.1, 0.3, 0.4]}
    ],
}  # fmt: skip


def make_run(
    root: Path,
    *,
    name: str | None = None,
    steps: int = 40,
    offset: float = 0.0,
    rate: float = 1e-3,
    seconds: float = 0.38,
    group: str | None = None,
) -> RunFolder:
    """A run beside its prediction, which still has its folder locked."""
    meta = {
        "model": "gpt-tiny", "machine": "here", "steps": 100, "predicted_seconds": 0.4,
        "predicted_interval": [0.3, 0.5], **({"name": name} if name else {}),
        **({"group": group} if group else {}),
    }  # fmt: skip
    run = create_run_folder(root, "gpt-tiny", documents={}, meta=meta)
    (run.path / "request.toml").write_text(f"[train]\nlearning_rate = {rate}\n")
    (run.path / "prediction.json").write_text(json.dumps(PREDICTION))
    (run.path / "timeline.predicted.json").write_text(json.dumps(TIMELINE))
    log_steps(run, range(1, steps + 1), offset, seconds)
    return run


def log_steps(
    run: RunFolder, steps: Sequence[int], offset: float = 0.0, seconds: float = 0.38
) -> None:
    """Logs steps whose loss is `4 / step + offset`."""
    for number in steps:
        run.append_step(
            Step(
                step=number, loss=4 / number + offset, gradient_norm=1 + offset, tokens=512,
                learning_rate=1e-3, seconds=seconds, memory_bytes=2**30,
                by_kind={"forward": 0.4 * seconds, "backward": 0.6 * seconds},
                held_out_loss=4 / number + offset + 0.1 if number % 20 == 0 else None,
            )
        )  # fmt: skip


def make_record(root: Path) -> None:
    """Three runs: an ordinary one, one with hostile texts, and one whose last loss is NaN."""
    for index, name in enumerate((None, HOSTILE[0], "third")):
        with make_run(root, name=name, offset=0.1 * index, rate=1e-3 * (index + 1)) as run:
            if index == 2:
                log_steps(run, [41], float("nan"))
            run.end("finished")
        if index == 1:
            annotate(run.path, tags=HOSTILE, note=HOSTILE[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that answers."""

    root: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as client:
            client.request(method, path, body, dict(headers or {}))
            answer = client.getresponse()
            return answer.status, answer.headers, answer.read()

    def ask(self, path: str) -> Any:  # noqa: ANN401  any JSON
        """The answer of a known client, which is no refusal."""
        status, _, body = self.send("GET", path, headers=KNOWN)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, value: object) -> tuple[int, bytes]:
        """Status and body of the answer to what a known client sends."""
        headers = KNOWN | {"Content-Type": "application/json"}
        status, _, body = self.send("POST", path, json.dumps(value).encode(), headers)
        return status, body

    def ids(self) -> list[str]:
        """The ids of all runs, oldest first."""
        rows = self.ask("/api/runs?columns=id&sort=id&archived=all")["rows"]
        return [row[0] for row in rows]


KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def serve(root: Path, *, port: int = 0, access: Access | None = None) -> Iterator[Served]:
    """Serves a folder of runs in a thread, until the block ends."""
    access = access or Access(token=TOKEN, names=LOOPBACK_NAMES)
    analyses = Analyses(
        diff=lambda folders: diff(*folders, root=root), judge=lambda one: judge(one, root=root)
    )
    with (
        listen("127.0.0.1", port) as listening,
        Catalog.open(root) as catalog,
        RecordServer(root, catalog, access, analyses) as server,
    ):
        answering = serve_app(server.app, listening, access)
        thread = threading.Thread(target=answering.run, args=([listening],))
        thread.start()
        try:
            yield Served(root=root, port=listening.getsockname()[1])
        finally:
            answering.should_exit = True
            thread.join()
