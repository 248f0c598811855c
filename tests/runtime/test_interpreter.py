"""The interpreter."""

import time

import pytest
import torch

from windlass.program.instruction import Instruction, Program
from windlass.runtime.handler import Handler
from windlass.runtime.interpreter import Interpreter, timer_for

PROGRAM = Program(
    plan="0" * 12,
    device=0,
    instructions=(
        Instruction("load_batch", None, 1),
        Instruction("forward", 2, 1),
        Instruction("update", 2),
        Instruction("sync"),
    ),
)
CPU = torch.device("cpu")


def interpreter(handler: Handler, program: Program = PROGRAM):
    handlers = dict.fromkeys(("load_batch", "forward", "update", "sync"), handler)
    return Interpreter(program, handlers, timer_for(CPU, len(program.instructions)))


def test_every_instruction_runs_once_in_order():
    ran = []
    interpreter(lambda *where: ran.append(where)).run()
    assert ran == [(0, 1), (2, 1), (2, 0), (0, 0)]


def test_each_instruction_ends_after_it_begins_and_before_the_next_begins():
    machine = interpreter(lambda *_: time.sleep(0.001))
    machine.run()
    lane = machine.timeline().devices[0]
    times = [at for span in zip(lane.starts, lane.ends, strict=True) for at in span]
    assert times == sorted(times)
    assert times[0] == 0
    assert all(e - s >= 0.001 for s, e in zip(lane.starts, lane.ends, strict=True))


def test_seconds_by_kind_sum_to_the_step_but_for_what_lies_between():
    machine = interpreter(lambda *_: time.sleep(0.002))
    machine.run()
    total = sum(machine.seconds_by_kind().values())
    assert set(machine.seconds_by_kind()) == {"load_batch", "forward", "update", "sync"}
    assert 0.008 <= total <= machine.step_seconds()


def test_a_timeline_names_what_ran():
    machine = interpreter(lambda *_: None)
    memory = machine.run_sampled(lambda: 7)
    timeline = machine.timeline(memory)
    lane = timeline.devices[0]
    assert not timeline.predicted
    assert lane.kinds == ("load_batch", "forward", "update", "sync")
    assert lane.layers == (None, 2, 2, None)
    assert lane.micro_batches == (1, 1, None, None)
    assert lane.memory_bytes == (7, 7, 7, 7)


def test_a_program_with_a_kind_that_nobody_handles_is_refused():
    program = PROGRAM.model_copy(update={"instructions": (Instruction("prefetch_weights", 1),)})
    with pytest.raises(KeyError):
        interpreter(lambda *_: None, program)


def test_an_empty_program_takes_no_time():
    machine = interpreter(lambda *_: None, PROGRAM.model_copy(update={"instructions": ()}))
    machine.run()
    assert machine.step_seconds() == 0
    assert machine.seconds_by_kind() == {}
