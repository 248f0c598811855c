"""The interpreter's cost for each instruction, and its share of a step.

Runs the program of a `gpt2-124m` step (12 blocks, some micro-batches) with handlers that do
nothing, interleaved with a bare loop that calls the same handlers without timing them, and compares
the cost with the given step time.

    python benchmarks/interpreter.py --micro-batches 1 --step-seconds 2.8
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from results import append_row
from windlass.program.instruction import Instruction, Program
from windlass.runtime.interpreter import Interpreter, timer_for
from windlass.torch_ext import device_for

LAYERS = 14
ROUNDS = 200


def program(micros: int) -> Program:
    """The program of one step of `LAYERS` layers."""
    steps: list[Instruction] = []
    for micro in range(micros):
        steps.append(Instruction("load_batch", None, micro))
        steps += [Instruction("forward", layer, micro) for layer in range(LAYERS)]
        steps += [Instruction("backward", layer, micro) for layer in reversed(range(LAYERS))]
    steps.append(Instruction("grad_norm"))
    steps += [Instruction("update", layer) for layer in range(LAYERS)]
    return Program(plan="0" * 12, device=0, instructions=(*steps, Instruction("sync")))


def nothing(layer: int, micro: int) -> None:
    """A handler that does nothing, so that only the interpreter takes time."""


def seconds(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measures, prints, and appends a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=2.8)
    options = parser.parse_args()
    steps = program(options.micro_batches)
    length = len(steps.instructions)
    kinds = {instruction.kind for instruction in steps.instructions}
    handlers = dict.fromkeys(kinds, nothing)
    interpreter = Interpreter(steps, handlers, timer_for(device_for("cpu"), length))
    calls = [(nothing, 0, 0)] * length

    def bare() -> None:
        for handler, layer, micro in calls:
            handler(layer, micro)

    def interpreted() -> None:
        interpreter.run()
        interpreter.seconds_by_kind()
        interpreter.step_seconds()

    pairs = [(seconds(interpreted), seconds(bare)) for _ in range(ROUNDS)]
    ours = statistics.median(pair[0] for pair in pairs)
    spread = statistics.quantiles([pair[0] for pair in pairs], n=10)
    each = ours / length
    share = ours / options.step_seconds
    sys.stdout.write(
        f"{length} instructions: {each * 1e6:.2f} us each (80 % of rounds within "
        f"{spread[0] / length * 1e6:.2f} to {spread[-1] / length * 1e6:.2f}), of which the call "
        f"itself {statistics.median(pair[1] for pair in pairs) / length * 1e6:.2f} us; "
        f"{share:.4%} of a step of {options.step_seconds} s\n"
    )
    append_row(
        "interpreter",
        instructions=length,
        us_each=f"{each * 1e6:.3f}",
        step_seconds=options.step_seconds,
        share=f"{share:.6f}",
    )


if __name__ == "__main__":
    main()
