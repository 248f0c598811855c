"""The interpreter."""

import time

import pytest

from windlass.program.instruction import Instruction, Program
from windlass.runtime.interpreter import Handler, Interpreter, timer_for
from windlass.torch_ext import device_for

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
CPU = device_for("cpu")


def interpreter(handler: Handler, program: Program = PROGRAM):
    handlers = dict.fromkeys(("load_batch", "forward", "update", "sync"), handler)
    return Interpreter(program, handlers, timer_for(CPU, len(program.instructions)))


def test_every_instruction_runs_once_in_order():
    ran = []
    interpreter(lambda *where: ran.append(where)).run()
    assert ran == [(0, 1), (2, 1), (2, 0), (0, 0)]


def test_each_instruction_ends_after_it_begins_and_before_the_next_begins():
    running = interpreter(lambda *_: time.sleep(0.001))
    running.run()
    device = running.timeline().devices[0]
    times = [time for span in zip(device.starts, device.ends, strict=True) for time in span]
    assert times == sorted(times)
    assert times[0] == 0
    assert all(e - s >= 0.001 for s, e in zip(device.starts, device.ends, strict=True))


def test_seconds_by_kind_sum_to_the_step_without_the_gaps():
    running = interpreter(lambda *_: time.sleep(0.002))
    running.run()
    total = sum(running.seconds_by_kind().values())
    assert set(running.seconds_by_kind()) == {"load_batch", "forward", "update", "sync"}
    assert 0.008 <= total <= running.step_seconds()


def test_an_arrival_is_the_mean_start_of_what_waits_for_other_ranks():
    receives = [Instruction("receive", 1, 0), Instruction("receive", 1, 1)]
    run = [Instruction("forward", 2, 0), receives[0], Instruction("forward", 2, 1), receives[1]]
    program = PROGRAM.model_copy(update={"instructions": (*run, Instruction("sync"))})
    handlers = dict.fromkeys(("forward", "receive", "sync"), lambda *_: time.sleep(0.001))
    running = Interpreter(program, handlers, timer_for(CPU, 5))
    running.run()
    device = running.timeline().devices[0]
    assert running.arrivals_by_kind() == {
        "receive": (device.starts[1] + device.starts[3]) / 2, "sync": device.starts[4],
    }  # fmt: skip


def test_a_timeline_contains_the_instructions():
    running = interpreter(lambda *_: None)
    memory = running.run_sampled(lambda: 7)
    timeline = running.timeline(memory)
    device = timeline.devices[0]
    assert not timeline.predicted
    assert device.kinds == ("load_batch", "forward", "update", "sync")
    assert device.layers == (None, 2, 2, None)
    assert device.micro_batches == (1, 1, None, None)
    assert device.memory_bytes == (7, 7, 7, 7)


def test_an_instruction_kind_without_a_handler_is_refused():
    program = PROGRAM.model_copy(update={"instructions": (Instruction("prefetch_weights", 1),)})
    with pytest.raises(KeyError):
        interpreter(lambda *_: None, program)


def test_an_empty_program_takes_no_time():
    running = interpreter(lambda *_: None, PROGRAM.model_copy(update={"instructions": ()}))
    running.run()
    assert running.step_seconds() == 0
    assert running.seconds_by_kind() == {}
