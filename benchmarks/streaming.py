"""What streaming costs: a model in phases from disk beside the same model in memory.

    python benchmarks/streaming.py [--model gpt2-124m] [--phases 6] [--micro 4] [--rounds 1]
        [--accumulations 1 2 4] [--recompute layer]

For each number of micro-batches both train for a few steps on the same text, each in a process of
its own, in turn. Layers of all phases but the last run forward twice, so the run in memory does as
well (`--recompute layer`): what is left between the two is what moving costs. Held against a run in
memory that keeps everything (`--recompute none`) that comes on top. The table sets the ratio of
their step times beside the predicted one, and the
bytes that the kernel counted (`/proc/self/io`) beside those of the program.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from apart import apart
from results import append_row

SEQUENCE = 512
WARM, MEASURED = 2, 3


def io_bytes() -> tuple[int, int]:
    """What this process has read from and written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = dict(line.split(": ") for line in lines)
    return int(counted["read_bytes"]), int(counted["write_bytes"])


def run(model: str, phases: int, micro: int, accumulation: int, recompute: str) -> None:
    """Trains in this process and prints what was measured and predicted as JSON."""
    import windlass

    steps = WARM + MEASURED + 1  # the last one evaluates and saves too
    planned = windlass.plan(
        model, f"phases={phases}", f"batch.micro={micro}", f"train.batch={micro * accumulation}",
        f"train.sequence={SEQUENCE}", f"train.steps={steps}", "precision=bfloat16", "compile=true",
        f"recompute={recompute}", f"train.evaluate_every={steps + 1}",
        f"train.save_every={steps + 1}",
    )  # fmt: skip
    seconds: list[float] = []
    moved: list[tuple[int, int]] = []
    memory = 0
    with tempfile.TemporaryDirectory(dir=Path.cwd(), suffix=".tmp") as folder:
        before = io_bytes()
        for step in windlass.train(planned, folder=Path(folder) / "run"):
            after = io_bytes()
            moved.append((after[0] - before[0], after[1] - before[1]))
            before = after
            seconds.append(step.seconds)
            memory = step.memory_bytes
    far = planned.prediction.offload
    counted = slice(WARM, WARM + MEASURED)
    told = {
        "seconds": statistics.median(seconds[counted]),
        "read_bytes": statistics.median(read for read, _ in moved[counted]),
        "written_bytes": statistics.median(written for _, written in moved[counted]),
        "peak_bytes": memory,
        "predicted_seconds": planned.prediction.step_seconds,
        "predicted_peak_bytes": planned.prediction.peaks[0].peak_bytes,
        "predicted_read_bytes": far.read_bytes if far else 0,
        "predicted_written_bytes": far.written_bytes if far else 0,
    }
    sys.stdout.write(json.dumps(told) + "\n")


def main() -> None:
    """Reads the command line, runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--recompute", choices=("layer", "none"), default="layer")
    parser.add_argument("--child", nargs=5)
    asked = parser.parse_args()
    if asked.child:
        model, phases, micro, accumulation, recompute = asked.child
        run(model, int(phases), int(micro), int(accumulation), recompute)
        return
    print(
        "tokens  in memory  streamed  speed (predicted)  read GB (predicted)  written GB  peak MiB"
    )
    for accumulation in asked.accumulations:
        for _ in range(asked.rounds):
            whole = apart(__file__, asked.model, 1, asked.micro, accumulation, asked.recompute)
            turns = apart(__file__, asked.model, asked.phases, asked.micro, accumulation, "none")
            row = {
                "model": asked.model, "phases": asked.phases, "recompute": asked.recompute,
                "tokens": asked.micro * accumulation * SEQUENCE,
                "in_memory_seconds": whole["seconds"],
                "predicted_in_memory_seconds": whole["predicted_seconds"],
                **turns,
            }  # fmt: skip
            append_row("streaming", **row)
            speed = whole["seconds"] / turns["seconds"]
            predicted = whole["predicted_seconds"] / turns["predicted_seconds"]
            print(
                f"{row['tokens']:6}  {whole['seconds']:8.2f} s  {turns['seconds']:6.2f} s  "
                f"{speed:5.2f} ({predicted:.2f})       "
                f"{turns['read_bytes'] / 1e9:5.2f} ({turns['predicted_read_bytes'] / 1e9:.2f})   "
                f"     {turns['written_bytes'] / 1e9:5.2f} "
                f"({turns['predicted_written_bytes'] / 1e9:.2f})  "
                f"{turns['peak_bytes'] / 2**20:.0f} "
                f"({turns['predicted_peak_bytes'] / 2**20:.0f})"
            )


if __name__ == "__main__":
    main()
