"""A loop that is not Windlass's own is recorded like one that is."""

import argparse
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from windlass.errors import InputErrors, RecordError, RequestError
from windlass.integrations import TrackedRun, init
from windlass.record import read_annotations
from windlass.schema import CONFIG_FILE, RunConfig
from windlass.tracking import JournalRow, journal_path, load_run, read_journal, read_series

PROLOGUE = """
import sys
from windlass.integrations import init
run = init(config={"lr": 0.5}, folder=sys.argv[1])
"""


@dataclass(frozen=True)
class Optimizer:
    lr: float
    betas: tuple[float, float]


def rows_of(run: TrackedRun, rank: int = 0) -> tuple[JournalRow, ...]:
    return read_journal(journal_path(run.folder, rank, 1)).rows


def python(code: str, folder: Path, *, check: bool = False) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-c", PROLOGUE + code, str(folder))
    return subprocess.run(command, capture_output=True, text=True, check=check)


def test_a_run_is_recorded_with_its_settings(tmp_path: Path):
    config = {"model": "mine", "optimizer": Optimizer(0.1, (0.9, 0.95)), "dtype": torch.float32}
    with init(
        config=config, name="first try", group="pair", tags=["a"], notes="n", root=tmp_path
    ) as run:
        run.log({"loss": 2.5, "val": {"loss": 3, "accuracy": np.float32(0.5)}}, step=10)
        run.log({"loss": torch.tensor(2.25, dtype=torch.bfloat16)})
    assert [(row.step, dict(row.values)) for row in rows_of(run)] == [
        (10, {"loss": 2.5, "val.loss": 3.0, "val.accuracy": 0.5}),
        (11, {"loss": 2.25}),
    ]
    record = load_run(run.folder)
    assert (record.state, record.faults, record.model) == ("finished", (), "mine")
    assert record.environment is not None
    assert {key: record.meta[key] for key in ("name", "group", "origin")} == {
        "name": "first try",
        "group": "pair",
        "origin": "init",
    }
    assert RunConfig.load(run.folder / CONFIG_FILE).values == {
        "model": "mine",
        "optimizer.lr": 0.1,
        "optimizer.betas": (0.9, 0.95),
        "dtype": "torch.float32",
    }
    annotations = read_annotations(run.folder)
    assert (annotations.tags, annotations.notes) == (("a",), ("n",))
    assert run.folder.parent == tmp_path
    assert "first-try" in run.folder.name


def test_settings_that_are_known_later_are_added(tmp_path: Path):
    with init(config={"lr": 0.1, "seed": 1}, root=tmp_path) as run:
        run.update_config({"seed": 2, "data": {"tokens": 5}})
    expected = {"lr": 0.1, "seed": 2, "data.tokens": 5}
    assert RunConfig.load(run.folder / CONFIG_FILE).values == expected
    assert not load_run(run.folder).faults
    with pytest.raises(RequestError, match="cannot change the config"):
        run.update_config({"a": 1})


def test_a_setting_that_looks_like_a_secret_is_not_kept(tmp_path: Path):
    with init(config={"key": "hf_" + "a" * 34, "lr": 0.1}, root=tmp_path) as run:
        pass
    assert "hf_a" not in (run.folder / CONFIG_FILE).read_text()


def test_two_values_of_one_name_are_both_kept(tmp_path: Path):
    with init(config={"a.b": 1, "a": {"b": 2}}, root=tmp_path) as run:
        run.log({"x": {"y": 1.0}, "x.y": 2.0})
    assert RunConfig.load(run.folder / CONFIG_FILE).values == {"a.b": 1, "a.b (2)": 2}
    values = {name: one.values.tolist() for name, one in read_series(run.folder).items()}
    assert (values["x.y"], values["x.y (2)"]) == ([1.0], [2.0])


def test_a_result_of_argparse_is_a_config(tmp_path: Path):
    with init(config=argparse.Namespace(lr=1, nested={"a": [1, 2]}), root=tmp_path) as run:
        pass
    assert RunConfig.load(run.folder / CONFIG_FILE).values == {"lr": 1, "nested.a": (1, 2)}
    with pytest.raises(RequestError, match="a config of type `int` has no keys"):
        init(config=3, root=tmp_path)


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path):
    with init(root=tmp_path) as run:
        run.log({"a": math.nan, "b": -math.inf, "c": np.float64("inf"), "d": True})
    assert str(dict(rows_of(run)[0].values)) == "{'a': nan, 'b': -inf, 'c': inf, 'd': 1.0}"


def test_what_is_no_number_is_refused_by_its_name_and_nothing_is_recorded(tmp_path: Path):
    with init(root=tmp_path) as run:
        with pytest.raises(RequestError, match="`note` is 'text', a str; log numbers"):
            run.log({"loss": 1.0, "note": "text"})
        with pytest.raises(RequestError, match=r"`x` is a tensor of shape \[3\]"):
            run.log({"x": torch.zeros(3)})
        with pytest.raises(RequestError, match="too large for a number of 64 bits"):
            run.log({"x": 10**400})
        with pytest.raises(RequestError, match="the name 1 is no text"):
            run.log({1: 1.0})  # type: ignore[dict-item]
        with pytest.raises(RequestError, match="the name '\\\\ud800' is no text"):
            run.log({"\ud800": 1.0})
        with pytest.raises(RequestError, match=r"step 1\.5 is no integer of 64 bits"):
            run.log({"a": 1.0}, step=1.5)  # type: ignore[arg-type]
        with pytest.raises(InputErrors) as error:
            run.log({"a": None, "b.c": [1], "": 1.0})
        assert len(error.value.messages) == 3
    assert rows_of(run) == ()


def test_an_error_in_the_block_breaks_the_run(tmp_path: Path):
    states = []
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), init(root=tmp_path) as run:
            raise error
        states.append(load_run(run.folder).state)
    assert states == ["broken", "interrupted"]


def test_a_finished_run_takes_no_more(tmp_path: Path):
    run = init(root=tmp_path)
    run.finish()
    run.finish()
    with pytest.raises(RecordError, match="was finished; `init` starts another"):
        run.log({"a": 1.0})


def test_an_error_that_nobody_catches_breaks_the_run(tmp_path: Path):
    python("run.log({'loss': 1.0}); raise SystemError", tmp_path / "broken")
    python("run.log({'loss': 1.0})", tmp_path / "good")
    assert load_run(tmp_path / "broken").state == "broken"
    assert load_run(tmp_path / "good").state == "finished"


def test_a_killed_process_loses_nothing_that_was_logged(tmp_path: Path):
    code = (
        "import os\nfor i in range(1, 501): run.log({'loss': i / 3, 'x': float(i)})\n"
        "os.kill(os.getpid(), 9)"
    )
    assert python(code, tmp_path / "run").returncode == -signal.SIGKILL
    record = load_run(tmp_path / "run")
    assert record.state == "killed"
    assert read_series(tmp_path / "run")["loss"].values.tolist() == [i / 3 for i in range(1, 501)]


def test_a_full_disk_ends_no_training_and_the_record_catches_up(tmp_path: Path):
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for step in range(1, 3001):
    if step == 100:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    if step == 2000:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    run.log({"loss": float(step)})
run.finish()
"""
    outcome = python(code, tmp_path / "run", check=True)
    told = outcome.stderr.splitlines()
    assert len(told) == 2, told
    assert "waits while the training goes on" in told[0]
    assert "has caught up" in told[1]
    assert read_series(tmp_path / "run")["loss"].values.tolist() == [*map(float, range(1, 3001))]
    assert load_run(tmp_path / "run").state == "finished"


def test_a_folder_that_was_deleted_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = init(folder=tmp_path / "run")
    run.folder.rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "windlass"):
        for _ in range(10):
            run.log({"loss": 1.0})
        run.finish()
    assert len(caplog.messages) == 2
    assert "was deleted or moved" in caplog.messages[0]


def test_a_run_goes_on_in_its_folder(tmp_path: Path):
    for attempt in (1, 2):
        with init(folder=tmp_path / "run") as run:
            run.log({"loss": float(attempt)}, step=attempt)
    assert read_series(run.folder)["loss"].values.tolist() == [1.0, 2.0]
    assert load_run(run.folder).attempts == 2


def test_a_run_of_windlass_itself_is_not_gone_on_with(tmp_path: Path):
    init(folder=tmp_path / "run").finish()
    (tmp_path / "run" / "request.toml").write_text("")
    with pytest.raises(RecordError, match="go on with it by `windlass resume`"):
        init(folder=tmp_path / "run")


def test_each_rank_writes_a_journal_of_its_own(tmp_path: Path):
    folder = tmp_path / "run"
    others: list[TrackedRun] = []
    thread = threading.Thread(target=lambda: others.append(init(folder=folder, rank=3)))
    thread.start()  # waits for rank 0
    with init(folder=folder, rank=0) as run:
        thread.join()
        run.log({"loss": 1.0})
        others[0].log({"loss": 3.0})
        others[0].finish()
    assert [row.values["loss"] for row in rows_of(run, 3)] == [3.0]
    assert [row.values["loss"] for row in rows_of(run, 0)] == [1.0]
    with pytest.raises(RequestError, match="rank 2 does not know the run of rank 0"):
        init(root=tmp_path, rank=2)


def test_a_forked_process_does_not_write_into_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with init(root=tmp_path) as run:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            with pytest.raises(RecordError, match="process 1 did not start the run"):
                run.log({"loss": 2.0})
            run.finish()  # a child's exit does not end its parent's run
        run.log({"loss": 1.0})
    assert [row.values["loss"] for row in rows_of(run)] == [1.0]


class SlowDevice:
    """Stands for a device: a copy arrives when the test says so, and waiting is counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has_arrived = False
        self.waits = 0
        device = self

        class Event:
            def __init__(self, _device: object) -> None: ...
            def record(self) -> None: ...
            def query(self) -> bool:
                return device.has_arrived

            def synchronize(self) -> None:
                device.waits += 1
                device.has_arrived = True

        class Scalar(torch.Tensor):
            @property
            def device(self) -> torch.device:  # type: ignore[override]
                return torch.device("cuda:0")

            def detach(self) -> "Scalar":
                return self

            def item(self) -> float:
                raise AssertionError("a number was read from the device")

            def to(self, place: str, *, non_blocking: bool) -> torch.Tensor:  # type: ignore[override]
                assert (place, non_blocking) == ("cpu", True)
                return self.as_subclass(torch.Tensor)

        patch.setattr(torch, "Event", Event)
        self.scalar: Callable[[float], torch.Tensor] = lambda x: torch.tensor(x).as_subclass(Scalar)


def test_log_never_waits_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    device = SlowDevice(monkeypatch)
    run = init(root=tmp_path)
    run.log({"loss": device.scalar(0.5), "lr": 0.1})
    run.log({"loss": 7.0})
    assert rows_of(run) == ()
    device.has_arrived = True
    run.log({"loss": device.scalar(0.25), "lr": 0.2})
    assert [row.values["loss"] for row in rows_of(run)] == [0.5, 7.0, 0.25]
    device.has_arrived = False
    run.log({"loss": device.scalar(0.125), "lr": 0.3})
    assert device.waits == 0
    run.finish()
    assert device.waits == 1
    rows = rows_of(run)
    assert [row.values["loss"] for row in rows] == [0.5, 7.0, 0.25, 0.125]
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert all(abs(row.time - time.time()) < 60 for row in rows)


@pytest.mark.gpu
def test_log_does_not_wait_for_a_gpu(tmp_path: Path):
    work = torch.randn(8192, 8192, device="cuda")
    run = init(root=tmp_path)
    run.log({"sum": work.sum()})
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        work = work @ work
        work = work / work.norm()
        run.log({"norm": work.norm()})
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    assert queued < (time.perf_counter() - began) / 2
    run.finish()
    assert len(rows_of(run)) == 51


@pytest.mark.slow
def test_ranks_of_torch_distributed_meet_in_one_run(tmp_path: Path):
    code = """
import os, sys
import torch.distributed as dist
from windlass.integrations import init
dist.init_process_group("gloo")
run = init(config={"lr": 0.5}, root=sys.argv[1])
run.log({"loss": float(run.rank)})
dist.barrier()
run.finish()
print(run.folder)
"""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    ranks = [
        subprocess.Popen(
            (sys.executable, "-c", code, str(tmp_path)),
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    folders = {json.dumps(rank.communicate(timeout=120)[0].strip()) for rank in ranks}
    assert len(folders) == 1
    folder = Path(json.loads(folders.pop()))
    for rank in range(2):
        (row,) = read_journal(journal_path(folder, rank, 1)).rows
        assert row.values == {"loss": float(rank)}
