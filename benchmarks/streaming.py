"""The cost of weight streaming: a model in phases from disk beside the same model in memory.

    python benchmarks/streaming.py [--model gpt2-124m] [--phases 6] [--micro 4] [--rounds 1]
        [--accumulations 1 2 4] [--against planner same]

For each number of micro-batches all variants train for a few steps on the same text, one after
the other, each in a process of its own. Streaming (`phases=6`, all state on disk) is compared with
two runs in memory of the same batch:

- `planner`: the plan that the planner chooses if everything stays in memory. A user would run this
  one, so this ratio is the price of streaming.
- `same`: a plan with the same arithmetic: the same micro-batch, precision and compiled code, and
  full recompute, because streaming runs the layers of all phases but the last forward twice. This
  ratio is the cost of the transfers alone.

The table shows the ratio of step times beside the predicted ratio, and the bytes that the kernel
counted (`/proc/self/io`) beside those of the program. Each ratio is one row of the results, in
which `recompute` is `planner` for the first comparison and `full` for the second.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from child_process import run_child
from results import append_row

SEQUENCE = 512
WARM, MEASURED = 2, 3
LONG_RUN = 10_000
"""Steps for which the planner chooses its plan, so that compiling pays; the run stops early."""
BASELINES = {"planner": "planner", "same": "full"}
"""Kind of run in memory -> its name in the results' column `recompute`."""


def io_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def overrides(kind: str, phases: int, micro: int, accumulation: int) -> Iterator[str]:
    """The overrides of a run: `planner`, `same` or `streamed`."""
    steps = LONG_RUN if kind == "planner" else WARM + MEASURED + 1
    yield f"train.batch={micro * accumulation}"
    yield f"train.sequence={SEQUENCE}"
    yield f"train.steps={steps}"
    yield f"train.evaluate_every={steps + 1}"
    yield f"train.save_every={steps + 1}"
    yield f"phases={phases if kind == 'streamed' else 1}"
    if kind != "planner":
        yield from (f"batch.micro={micro}", "precision=bfloat16", "compile=true")
        yield f"recompute={'full' if kind == 'same' else 'none'}"


def run(kind: str, model: str, phases: int, micro: int, accumulation: int) -> None:
    """Trains in this process and prints measured and predicted figures as JSON."""
    import windlass
    from windlass.program.activation_checkpointing import describe_recompute

    planned = windlass.plan(model, *overrides(kind, phases, micro, accumulation))
    seconds: list[float] = []
    transfers: list[tuple[int, int]] = []
    memory = 0
    with tempfile.TemporaryDirectory(
        dir=Path.cwd(), suffix=".tmp", ignore_cleanup_errors=True
    ) as folder:
        before = io_bytes()
        steps = iter(windlass.train(planned, folder=Path(folder) / "run"))
        for step in steps:
            after = io_bytes()
            transfers.append((after[0] - before[0], after[1] - before[1]))
            before = after
            seconds.append(step.seconds)
            memory = step.memory_bytes
            if kind == "planner" and len(seconds) == WARM + MEASURED:
                steps.close()  # type: ignore[attr-defined]  # a generator
                break
    offload, plan = planned.prediction.offload, planned.plan
    measured = slice(WARM, WARM + MEASURED)
    figures = {
        "seconds": statistics.median(seconds[measured]),
        "read_bytes": statistics.median(read for read, _ in transfers[measured]),
        "written_bytes": statistics.median(written for _, written in transfers[measured]),
        "peak_bytes": memory,
        "predicted_seconds": planned.prediction.step_seconds,
        "predicted_peak_bytes": planned.prediction.peaks[0].peak_bytes,
        "predicted_read_bytes": offload.read_bytes if offload else 0,
        "predicted_written_bytes": offload.written_bytes if offload else 0,
        "plan": f"micro {plan.batch.micro}, {plan.precision}, "
        f"{'compiled' if plan.compile else 'eager'}, {describe_recompute(plan)}",
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def main() -> None:
    """Reads the command line, runs the comparisons and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", nargs="+", choices=tuple(BASELINES), default=list(BASELINES))
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, model, *numbers = options.child
        run(kind, model, *map(int, numbers))
        return
    print(
        "tokens  against  in memory  streamed  speed (predicted)  read GB (predicted)  "
        "written GB   peak MiB"
    )
    for accumulation in options.accumulations:
        arguments = (options.model, options.phases, options.micro, accumulation)
        for _ in range(options.rounds):
            baselines = {kind: run_child(__file__, kind, *arguments) for kind in options.against}
            streamed = run_child(__file__, "streamed", *arguments)
            streamed.pop("plan")
            for kind, in_memory in baselines.items():
                row = {
                    "model": options.model, "phases": options.phases, "recompute": BASELINES[kind],
                    "tokens": options.micro * accumulation * SEQUENCE,
                    "in_memory_seconds": in_memory["seconds"],
                    "predicted_in_memory_seconds": in_memory["predicted_seconds"],
                    **streamed,
                }  # fmt: skip
                append_row("streaming", **row)
                print_row(kind, row)
                print(f"        in memory: {in_memory['plan']}", flush=True)


def print_row(kind: str, row: dict[str, object]) -> None:
    """Prints one comparison as a line of the table."""
    speed = row["in_memory_seconds"] / row["seconds"]
    predicted = row["predicted_in_memory_seconds"] / row["predicted_seconds"]
    print(
        f"{row['tokens']:6}  {kind:7}  {row['in_memory_seconds']:7.2f} s  {row['seconds']:6.2f} s  "
        f"{speed:5.2f} ({predicted:.2f})       "
        f"{row['read_bytes'] / 1e9:5.2f} ({row['predicted_read_bytes'] / 1e9:.2f})         "
        f"{row['written_bytes'] / 1e9:5.2f} ({row['predicted_written_bytes'] / 1e9:.2f})  "
        f"{row['peak_bytes'] / 2**20:.0f} ({row['predicted_peak_bytes'] / 2**20:.0f})"
    )


if __name__ == "__main__":
    main()
