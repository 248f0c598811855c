"""A rank is killed, stopped, or lacks memory or disk: it is named, all end, the run resumes."""

import contextlib
import random
import re
import resource
import signal
import socket
import time
from pathlib import Path
from typing import get_args

import pytest

from cli.rank_processes import (
    HANG_SECONDS,
    REPLICAS,
    RUN,
    SHORT_TIMEOUT,
    STAGES,
    ended,
    last_step,
    leave_no_disk,
    leave_no_memory,
    listeners,
    numbers,
    rank_processes,
    send,
    wait_for_ranks,
    wait_for_step,
    wait_until_gone,
    weights,
)
from command_line import Windlass, start
from windlass.program.instruction import BLOCKING_KINDS
from windlass.schema import CODE_FILE, DATA_FILE, ENVIRONMENT_FILE, InputName
from windlass.schema.plan import Plan
from windlass.schema.run_record import ATTEMPTS_FOLDER, PLAN_FILE
from windlass.tracking.run_inputs import input_fingerprints
from windlass.tracking.run_reader import load_run
from windlass.tracking.series import read_series

Surroundings = dict[str, str]

SUMMED = 0.01
"""Largest difference of the losses: the sum of two float32 gradients in another order differs by
1e-7, which grows to this over 120 updates."""


def as_if_nothing_had_happened(folder: Path, whole: Path) -> None:
    """Asserts that losses and weights of a run equal those of another one bit for bit."""
    assert load_run(folder).state == "finished"
    assert numbers(load_run(folder)) == numbers(load_run(whole))
    assert weights(folder) == weights(whole)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_after_its_parent_is_killed_and_a_rank_killed_or_stopped(
    surroundings: Surroundings, tmp_path: Path, whole: Path
) -> None:
    folder, resume = tmp_path / "run", ("resume", "run", "--runs", ".")

    process = start(surroundings, tmp_path, "train", *STAGES, *SHORT_TIMEOUT, "--folder", "run")
    ranks = wait_for_ranks(process.pid)
    send(ranks[1], signal.SIGSTOP)
    process.kill()
    wait_until_gone(ranks)
    ended(process)
    assert load_run(folder).state == "killed"

    process = start(surroundings, tmp_path, *resume)
    ranks = wait_for_ranks(process.pid)
    wait_for_step(folder, 7)
    send(ranks[1], signal.SIGKILL)
    wait_until_gone(ranks)
    news = ended(process)
    assert process.returncode == 1, news
    assert "rank 1 (pipeline stage 1, tensor-parallel rank 0, data-parallel rank 0) in step" in news
    assert "was killed by SIGKILL" in news
    assert re.search(r"checkpoints/step-\d+`; continue with `windlass resume run", news)
    assert "Traceback" not in news

    done = load_run(folder).steps[-1].step
    process = start(surroundings, tmp_path, *resume)
    ranks = wait_for_ranks(process.pid)
    wait_for_step(folder, done + 3)  # a step that only this attempt has done
    send(ranks[0], signal.SIGSTOP)
    wait_until_gone(ranks, HANG_SECONDS + 10)
    news = ended(process)
    assert process.returncode == 1, news
    assert "rank 0 (pipeline stage 0, tensor-parallel rank 0, data-parallel rank 0) in step" in news
    assert "is stopped" in news

    process = start(surroundings, tmp_path, *resume)
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    as_if_nothing_had_happened(folder, whole)


def test_each_rank_records_its_arrivals_and_a_run_its_host_and_all_inputs(
    eight_steps: Path,
) -> None:
    record = load_run(eight_steps)
    assert len(record.steps_by_rank) == 2
    for steps in record.steps_by_rank:
        for step in steps:
            assert step.arrivals.keys() == step.by_kind.keys() & set(BLOCKING_KINDS)
            assert {"receive", "sync"} <= step.arrivals.keys()
            assert 0 < step.arrivals["receive"] < step.arrivals["sync"] < step.seconds
            assert (step.cpu_seconds or 0) > 0
    assert {"sys.cpu", "sys.memory_bytes"} <= read_series(eight_steps).keys()
    assert set(input_fingerprints(eight_steps)) == set(get_args(InputName))
    sealed = {name for event in record.events for name in event.fields.get("files", ())}
    assert {CODE_FILE, DATA_FILE, ENVIRONMENT_FILE} <= sealed
    assert record.faults == ()


@pytest.mark.slow
def test_a_disk_that_is_full_while_a_run_logs_ends_nothing_and_no_row_is_lost(
    surroundings: Surroundings, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "run", 1500
    seldom = (f"train.steps={steps}", "train.save_every=9999", "train.evaluate_every=9999")
    process = start(surroundings, tmp_path, "train", *RUN, *seldom, "--folder", "run")
    wait_for_step(folder, 5)
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)

    # A limit on file sizes: a write beyond it fails as one on a full disk does.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    time.sleep(0.2)
    done = last_step(folder)
    time.sleep(1)
    assert last_step(folder) == done < steps
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)

    assert process.wait(timeout=120) == 0, ended(process)
    news = ended(process)
    assert "no space left to write" in news
    assert "training goes on, and its record waits" in news
    record = load_run(folder)
    assert [step.step for step in record.steps] == list(range(1, steps + 1))
    assert (record.state, record.faults) == ("finished", ())


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_reported_and_leaves_nothing_incomplete(
    surroundings: Surroundings, tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "run"
    process = start(surroundings, tmp_path, "train", *STAGES, "--folder", "run")
    ranks = wait_for_ranks(process.pid)
    wait_for_step(folder, 22)
    leave_no_disk(ranks[1])
    wait_until_gone(ranks)
    news = ended(process)
    assert process.returncode == 2, news
    assert "rank 1 (pipeline stage 1, tensor-parallel rank 0, data-parallel rank 0)" in news
    assert "no space left to write" in news
    assert not list((folder / "checkpoints").glob(".*"))

    process = start(surroundings, tmp_path, "resume", "run", "--runs", ".")
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    as_if_nothing_had_happened(folder, whole)


@pytest.mark.slow
def test_a_rank_without_memory_is_named(surroundings: Surroundings, tmp_path: Path) -> None:
    words = (*RUN, "parallel.data=2", "model.width=256", "train.steps=2000")
    process = start(surroundings, tmp_path, "train", *words, "--folder", "run")
    ranks = wait_for_ranks(process.pid)
    wait_for_step(tmp_path / "run", 1)
    leave_no_memory(ranks[1])
    wait_until_gone(ranks, 30)
    news = ended(process)
    assert process.returncode == 2, news
    assert "rank 1 (pipeline stage 0, tensor-parallel rank 0, data-parallel rank 1)" in news
    assert "memory ran out in step" in news
    assert "Traceback" not in news


OWN = """
import os
from torch import nn

class Frail(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 40 and open("/proc/self/comm").read().startswith("rank "):
            raise ValueError("the frail one breaks")
        return x + self.lin(x)

def build():
    return nn.Sequential(nn.Embedding(257, 16), Frail(), nn.Linear(16, 257))
"""


@pytest.mark.slow
def test_an_error_in_a_users_model_is_reported_with_its_rank_and_traceback_file(
    windlass: Windlass, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ("own.py:build", "data.tokenizer=byte", "train.sequence=32", "train.batch=4")
    more = ("precision=float32", "compile=false", "train.steps=90", "parallel.pipeline=2")

    done = windlass("train", *words, *more, "--folder", "run")

    assert done.returncode == 3, done.stderr
    assert "ValueError: the frail one breaks; its traceback is in `run/ranks/" in done.stderr
    where = r"pipeline stage \d, tensor-parallel rank 0, data-parallel rank 0"
    assert re.search(rf"rank \d \({where}\) in step \d+, at", done.stderr)
    trace = re.search(r"its traceback is in `([^`]+)`", done.stderr)
    assert trace is not None
    assert "own.py" in (tmp_path / trace[1]).read_text()


@pytest.mark.slow
def test_a_process_that_sends_garbage_to_every_port_of_a_run_does_not_stop_it(
    surroundings: Surroundings, tmp_path: Path, whole: Path
) -> None:
    """A rank listens with gloo only: there is no store whose keys another process could set."""
    process = start(surroundings, tmp_path, "train", *STAGES, "--folder", "run")
    ranks = wait_for_ranks(process.pid)
    addresses: set[tuple[str, int]] = set()
    while process.poll() is None:
        found = listeners([process.pid, *ranks.values()])
        for address in found:
            with contextlib.suppress(OSError), socket.create_connection(address, 1) as attack:
                attack.sendall(random.randbytes(200))
        addresses |= found
        time.sleep(0.01)
    news = ended(process)
    assert process.returncode == 0, news
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    as_if_nothing_had_happened(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),  # as systemd and schedulers send it
        (signal.SIGHUP, True),
    ],
)
def test_a_stop_request_completes_and_saves_the_current_step_and_ends_all_ranks(
    surroundings: Surroundings,
    tmp_path: Path,
    whole: Path,
    number: signal.Signals,
    to_all: bool,
) -> None:
    words = ("train", *STAGES, "train.save_every=1000", "--folder", "run")
    process = start(surroundings, tmp_path, *words)
    ranks = wait_for_ranks(process.pid)
    wait_for_step(tmp_path / "run", 7)
    for receiver in (*(ranks.values() if to_all else ()), process.pid):
        send(receiver, number)
    wait_until_gone(ranks)
    news = ended(process)
    assert process.returncode == 130, news
    record = load_run(tmp_path / "run")
    assert record.state == "interrupted"
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{record.steps[-1].step:08d}"

    process = start(surroundings, tmp_path, "resume", "run", "--runs", ".")
    assert process.wait(timeout=120) == 0, ended(process)
    ended(process)
    as_if_nothing_had_happened(tmp_path / "run", whole)


@pytest.mark.slow
def test_an_elastic_run_that_loses_a_replica_continues_without_it(
    surroundings: Surroundings, tmp_path: Path, windlass: Windlass
) -> None:
    words = (*REPLICAS, "train.steps=120")
    assert windlass("train", *words, "--folder", "whole").returncode == 0
    process = start(surroundings, tmp_path, "train", *words, "--elastic", "--folder", "run")
    ranks = wait_for_ranks(process.pid)
    folder = tmp_path / "run"
    wait_for_step(folder, 7)
    send(ranks[1], signal.SIGKILL)
    wait_until_gone(ranks)
    news = ended(process)
    assert process.returncode == 0, news
    assert "was killed by SIGKILL" in news
    record = load_run(folder)
    first = record.current_plan_steps[0].step
    assert f"1 of 2 devices are left (parallel.data=1); continues after step {first - 1}" in news
    assert (record.state, record.attempts) == ("finished", 2)
    assert record.plan is not None
    assert record.plan.parallel.devices == 1
    assert Plan.load(folder / ATTEMPTS_FOLDER / "1" / PLAN_FILE).parallel.data == 2

    whole, run = load_run(tmp_path / "whole").steps, record.steps
    assert [step.step for step in run] == [step.step for step in whole]
    assert [step.loss for step in run[: first - 1]] == [step.loss for step in whole[: first - 1]]
    assert [step.loss for step in run] == pytest.approx([s.loss for s in whole], abs=SUMMED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seed"), [(STAGES, 1), (REPLICAS, 2)], ids=["stages", "replicas"]
)
def test_fifty_random_kills_and_stops_lose_nothing(
    surroundings: Surroundings,
    tmp_path: Path,
    words: tuple[str, ...],
    seed: int,
) -> None:
    words = (
        *words,
        *SHORT_TIMEOUT,
        "train.steps=2000",
        "train.save_every=10",
        "train.evaluate_every=500",
    )
    process = start(surroundings, tmp_path, "train", *words, "--folder", "whole")
    assert process.wait(timeout=300) == 0, ended(process)
    ended(process)
    folder, draw = tmp_path / "run", random.Random(seed)
    verb: tuple[str, ...] = ("train", *words, "--folder", "run")
    for turn in range(50):
        done = last_step(folder)
        process = start(surroundings, tmp_path, *verb)
        ranks = wait_for_ranks(process.pid)
        if turn % 5 == 4:
            time.sleep(draw.uniform(0.0, 4.0))  # during start-up, or soon after it
        else:
            wait_for_step(folder, min(done + draw.randint(1, 30), 1990))
            time.sleep(draw.uniform(0.0, 0.05))
        victim = draw.choice([ranks[0], ranks[1], process.pid])
        # Only a person stops a parent process, so that it is killed here but never stopped.
        stops = victim != process.pid and draw.random() < 0.3
        assert process.poll() is None
        send(victim, signal.SIGSTOP if stops else signal.SIGKILL)
        news = ended(process)
        wait_until_gone(ranks)
        assert "Traceback" not in news
        if victim != process.pid:
            rank = next(rank for rank, pid in ranks.items() if pid == victim)
            how = "is stopped" if stops else "was killed by SIGKILL"
            assert process.returncode == 1, news
            assert f"rank {rank} (" in news
            assert how in news
        verb = ("resume", "run", "--runs", ".")
    assert not rank_processes(process.pid)

    process = start(surroundings, tmp_path, *verb)
    assert process.wait(timeout=300) == 0, ended(process)
    ended(process)
    as_if_nothing_had_happened(folder, tmp_path / "whole")
