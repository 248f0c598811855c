"""A log that another engine wrote is read step by step; what cannot be read is counted."""

import math
from pathlib import Path

import pytest

from engine_log_texts import LOGS, callback, many, megatron, memory, titan
from windlass.errors import RecordError, RequestError
from windlass.integrations import LogSize, ReadLog, load_log_format, read_log

SIZE = LogSize(tokens=65_536, samples=8, ranks=8)


def read(stack: str, text: str, folder: Path, suffix: str = "log", size: LogSize = SIZE) -> ReadLog:
    path = folder / f"run.{suffix}"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return read_log([path], load_log_format(stack), size)


@pytest.mark.parametrize("name", LOGS)
def test_each_log_has_its_steps_and_says_what_it_lacks(name: str, tmp_path: Path) -> None:
    log = LOGS[name]

    found = read(log.stack, log.text, tmp_path, log.suffix)

    last = found.steps[-1].values
    assert len(found.steps) == log.steps
    loss, seconds = last.get("loss"), last.get("seconds")
    if log.loss is not None:
        assert loss == pytest.approx(log.loss, nan_ok=True)
    assert seconds == (None if log.seconds is None else pytest.approx(log.seconds))
    counted = [f"{count} {what}" for what, count in found.left_out.items()]
    assert len(counted) == len(log.left_out), counted
    assert all(any(each.startswith(part) for each in counted) for part in log.left_out), counted


def test_reserved_and_allocated_memory_are_apart(tmp_path: Path) -> None:
    reserved = read("torchtitan", many(titan), tmp_path).steps[-1].values
    both = read("megatron", megatron(1) + memory(0), tmp_path).steps[-1].values

    assert "memory_bytes" not in reserved
    assert reserved["reserved_bytes"] == pytest.approx(47.28 * 2**30)
    assert (both["memory_bytes"], both["reserved_bytes"]) == (40 * 2**30, 50 * 2**30)


def test_first_steps_that_compile_are_warm_up(tmp_path: Path) -> None:
    text = callback(1, 60.0) + callback(2, 9.0) + "".join(map(callback, range(3, 12)))

    steps = read("accelerate", text, tmp_path, "jsonl").steps

    assert [each.values.get("warm_up_seconds") for each in steps[:3]] == [60.0, 9.0, None]
    assert all("seconds" in each.values for each in steps[2:])


def test_without_a_plan_what_needs_it_is_counted(tmp_path: Path) -> None:
    found = read("torchtitan", titan(1) + titan(1 + 1), tmp_path, size=LogSize())

    assert len(found.steps) == 2
    assert all(math.isfinite(each.values["loss"]) for each in found.steps)


def test_a_file_without_steps_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no step as `torchtitan` writes it"):
        read("torchtitan", many(megatron), tmp_path)


def test_an_unknown_engine_names_those_that_are_known() -> None:
    with pytest.raises(RequestError, match="did you mean `torchtitan`"):
        load_log_format("torchtitn")


def test_a_pipe_is_refused_before_it_is_opened() -> None:
    with pytest.raises(RecordError, match="not a regular file"):
        read_log([Path("/dev/zero")], load_log_format("torchtitan"), SIZE)
