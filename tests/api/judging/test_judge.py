import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from made_records import STEPS, make_run

from windlass import api
from windlass.errors import RequestError
from windlass.record import annotate


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six clean runs."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(6):
        make_run(folder, seed).end("finished")
    return folder


def test_a_run_is_judged_beside_the_other_runs_of_its_plan(root: Path):
    verdict = api.judge("last", root=root)
    assert (verdict.level, verdict.peers, verdict.step) == ("expected", 5, STEPS)


def test_a_slow_run_names_its_kind_of_instruction_and_leaves_the_history_when_marked(root: Path):
    run = make_run(root, 100, factor=2.0)
    run.end("finished")
    verdict = api.judge(run.path, root=root)
    assert (verdict.level, verdict.kind, verdict.cause) == ("slow", "forward", "host")
    assert verdict.since_step is not None
    assert abs(verdict.since_step - 21) <= 2
    annotate(run.path, broken=True)
    assert api.judge(next(f for f in root.glob("20*") if f != run.path), root=root).peers == 5


def test_a_followed_run_gives_a_verdict_while_it_goes_and_the_last_one_at_its_end(root: Path):
    run = make_run(root, 7)
    verdicts = api.follow_verdict(run.path, root=root, poll_seconds=0.01)
    assert next(verdicts).level == "expected"
    run.end("broken", reason="the loss of step 61 is not finite")
    (last,) = verdicts
    assert (last.level, last.sentences) == ("broken", ("the loss of step 61 is not finite",))
    annotate(run.path, broken=True)


def test_an_alert_command_gets_the_verdict_on_its_standard_input_and_no_shell_sees_it(
    root: Path, tmp_path: Path
):
    verdict = api.judge("last", root=root)
    taken = tmp_path / "taken.json"
    script = tmp_path / "take.py"
    script.write_text("import sys; open(sys.argv[1], 'w').write(sys.stdin.read())")
    api.send_alert(f"{sys.executable} {script} {taken} $(touch {tmp_path}/shell)", verdict, root)
    assert json.loads(taken.read_text())["verdict"]["level"] == verdict.level
    assert not (tmp_path / "shell").exists()


def test_an_alert_to_an_address_is_posted_as_json(root: Path):
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        verdict = api.judge("last", root=root)
        api.send_alert(f"http://127.0.0.1:{server.server_port}/hook", verdict, root)
        thread.join()
    assert bodies[0]["headline"] == verdict.headline


@pytest.mark.parametrize("target", ["", "say 'hello", "no-such-program-here"])
def test_an_alert_that_nobody_can_take_is_refused_in_one_sentence(target: str, root: Path):
    with pytest.raises(RequestError, match="alert"):
        api.send_alert(target, api.judge("last", root=root), root)
