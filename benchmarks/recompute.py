"""What activation recompute costs in time and saves in memory, under falling memory budgets.

    python benchmarks/recompute.py [--model gpt-tiny] [--layers 8] [--steps 8]

One plan keeps all activations, one recomputes all layers, and for budgets in between the planner
chooses; each trains in a process of its own, one after the other. The table shows measured beside
predicted values, relative to the plan that keeps everything.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from child_process import run_child
from results import append_row

WARM = 2
"""Steps that are not measured."""
MICRO, SEQUENCE = 16, 256
SHARES = (0.75, 0.5, 0.25)
"""Budgets: shares of the memory that full recompute saves."""


def plan_of(model: str, layers: int, steps: int, *pins: str):  # noqa: ANN201  imported late
    """The plan under some pinned choices."""
    import windlass

    return windlass.plan(
        model, f"model.layers={layers}", f"train.sequence={SEQUENCE}", f"train.batch={MICRO}",
        f"batch.micro={MICRO}", f"train.steps={WARM + steps + 1}", "precision=float32",
        "compile=false", "phases=1", f"train.evaluate_every={WARM + steps + 2}",
        f"train.save_every={WARM + steps + 2}", *pins,
    )  # fmt: skip


def run(model: str, layers: int, steps: int, pin: str) -> None:
    """Trains in this process and prints measured and predicted figures as JSON."""
    import windlass
    from windlass.program.activation_checkpointing import describe_recompute

    planned = plan_of(model, layers, steps, pin)
    with tempfile.TemporaryDirectory() as folder:
        steps_done = list(windlass.train(planned, folder=Path(folder) / "run"))
    measured = steps_done[WARM : WARM + steps]
    row = {
        "plan": describe_recompute(planned.plan),
        "seconds": statistics.median(step.seconds for step in measured),
        "predicted_seconds": planned.prediction.step_seconds,
        "peak_bytes": max(step.memory_bytes for step in measured),
        "predicted_peak_bytes": planned.prediction.peaks[0].peak_bytes,
    }
    sys.stdout.write(json.dumps(row) + "\n")


def main() -> None:
    """Reads the command line, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--child", nargs=4)
    options = parser.parse_args()
    if options.child:
        model, layers, steps, pin = options.child
        run(model, int(layers), int(steps), pin)
        return
    size = (options.model, options.layers, options.steps)
    kept, recomputed = (
        plan_of(*size, f"recompute={how}").prediction.peaks[0].peak_bytes
        for how in ("none", "full")
    )
    budgets = (f"memory={round(recomputed + share * (kept - recomputed))}" for share in SHARES)
    baseline: dict[str, float | str] = {}
    print("time and peak memory relative to the first plan, measured (predicted)")
    for pin in ("recompute=none", *budgets, "recompute=selective", "recompute=full"):
        row = run_child(__file__, *size, pin)
        baseline = baseline or row
        append_row(
            "recompute", model=options.model, layers=options.layers, micro=MICRO, asked=pin, **row
        )
        cells = [
            f"{row[name] / baseline[name]:.2f} ({row[predicted] / baseline[predicted]:.2f})"
            for name, predicted in (("seconds", "predicted_seconds"),
                               ("peak_bytes", "predicted_peak_bytes"))
        ]  # fmt: skip
        print(f"{pin:22} {cells[0]:14} {cells[1]:14} {row['plan']}", flush=True)


if __name__ == "__main__":
    main()
