"""What recompute costs in time and saves in memory, under a budget of memory that falls.

    python benchmarks/recompute.py [--model gpt-tiny] [--layers 8] [--steps 8]

One plan with everything kept, one with all layers run again, and what the planner makes of budgets
in between; each trains in a process of its own, one after the other. The table sets measured beside
predicted, both held against the plan that keeps everything.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from apart import apart
from results import append_row

WARM = 2
"""Steps that do not count."""
MICRO, SEQUENCE = 16, 256
SHARES = (0.75, 0.5, 0.25)
"""Of what running all layers again saves, how much a budget leaves."""


def plan_of(model: str, layers: int, steps: int, *pins: str):  # noqa: ANN201  imported late
    """The plan for one way."""
    import windlass

    return windlass.plan(
        model, f"model.layers={layers}", f"train.sequence={SEQUENCE}", f"train.batch={MICRO}",
        f"batch.micro={MICRO}", f"train.steps={WARM + steps + 1}", "precision=float32",
        "compile=false", "phases=1", f"train.evaluate_every={WARM + steps + 2}",
        f"train.save_every={WARM + steps + 2}", *pins,
    )  # fmt: skip


def run(model: str, layers: int, steps: int, pin: str) -> None:
    """Trains in this process and prints what was measured and predicted as JSON."""
    import windlass
    from windlass.program.activation_checkpointing import describe_recompute

    planned = plan_of(model, layers, steps, pin)
    with tempfile.TemporaryDirectory() as folder:
        told = list(windlass.train(planned, folder=Path(folder) / "run"))
    counted = told[WARM : WARM + steps]
    row = {
        "plan": describe_recompute(planned.plan),
        "seconds": statistics.median(step.seconds for step in counted),
        "predicted_seconds": planned.prediction.step_seconds,
        "peak_bytes": max(step.memory_bytes for step in counted),
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
    asked = parser.parse_args()
    if asked.child:
        model, layers, steps, pin = asked.child
        run(model, int(layers), int(steps), pin)
        return
    size = (asked.model, asked.layers, asked.steps)
    most, least = (
        plan_of(*size, f"recompute={how}").prediction.peaks[0].peak_bytes
        for how in ("none", "layer")
    )
    budgets = (f"memory={round(least + share * (most - least))}" for share in SHARES)
    base: dict[str, float] = {}
    print("time and peak against the first, measured (predicted)")
    for pin in ("recompute=none", *budgets, "recompute=selective", "recompute=full"):
        row = apart(__file__, *size, pin)
        base = base or row
        append_row(
            "recompute", model=asked.model, layers=asked.layers, micro=MICRO, asked=pin, **row
        )
        told = [
            f"{row[name] / base[name]:.2f} ({row[said] / base[said]:.2f})"
            for name, said in (("seconds", "predicted_seconds"),
                               ("peak_bytes", "predicted_peak_bytes"))
        ]  # fmt: skip
        print(f"{pin:22} {told[0]:14} {told[1]:14} {row['plan']}", flush=True)


if __name__ == "__main__":
    main()
