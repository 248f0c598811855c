"""What storing the optimizer's moments in fewer bits costs: loss, bytes and time.

    python benchmarks/moments.py [--model gpt-tiny] [--steps 300] [--seeds 2] [--beta2 0.95]

Trains the same model on the same text in each format and from each seed, in turn. The table shows
held-out losses for each seed, because a difference only counts against the spread between seeds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import get_args

import windlass
from results import append_row
from windlass.schema.plan import MomentFormat

SEQUENCE, BATCH = 128, 8
WARM = 20
"""First steps, which the step time leaves out."""


def run(model: str, moments: str, seed: int, steps: int, beta2: float) -> dict[str, float]:
    """Trains once; returns held-out loss, bytes a parameter, seconds of steps and updates."""
    planned = windlass.plan(
        model, f"moments={moments}", f"train.seed={seed}", f"train.steps={steps}",
        f"train.batch={BATCH}", f"train.sequence={SEQUENCE}", f"train.betas=[0.9, {beta2}]",
        "precision=float32", "compile=false", "recompute=none", f"batch.micro={BATCH}",
        f"train.evaluate_every={steps}", f"train.save_every={steps}", "train.keep=1",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        steps_done = list(windlass.train(planned, folder=Path(folder) / "run"))
    plan, measured = planned.plan, steps_done[WARM:]
    return {
        "held_out_loss": steps_done[-1].held_out_loss or float("nan"),
        "bytes_a_parameter": plan.parameter_itemsize
        + plan.gradient_itemsize
        + plan.optimizer_bytes_per_parameter,
        "step_seconds": statistics.median(step.seconds for step in measured),
        "update_seconds": statistics.median(step.by_kind["update"] for step in measured),
        "predicted_update_seconds": planned.prediction.by_kind["update"],
    }


def main() -> None:
    """Reads the command line, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--beta2", type=float, default=0.95)
    options = parser.parse_args()
    print("moments   seed  held-out loss  bytes a parameter  step ms  update ms (predicted)")
    for seed in range(options.seeds):
        for moments in get_args(MomentFormat):
            row = run(options.model, moments, seed, options.steps, options.beta2)
            append_row(
                "moments", model=options.model, moments=moments, seed=seed, steps=options.steps,
                beta2=options.beta2, tokens=BATCH * SEQUENCE, **row,
            )  # fmt: skip
            print(
                f"{moments:9} {seed:4}  {row['held_out_loss']:13.4f}  "
                f"{row['bytes_a_parameter']:17.2f}  {1e3 * row['step_seconds']:7.1f}  "
                f"{1e3 * row['update_seconds']:9.2f} "
                f"({1e3 * row['predicted_update_seconds']:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
