"""A training step with sparse weights beside the same step with dense ones.

    python benchmarks/sparse_step.py [--model gpt2-355m] [--level 0.875] [--block 64]
        [--precision float32 bfloat16] [--batch 2] [--sequence 512] [--rounds 3]
        [--set KEY=VALUE ...]

Dense and sparse weights train in a process each, by the plan that Windlass makes for them, and take
one step in turn, so that changes in the speed of a shared machine affect both alike. The table
shows the ratio of their steps within a round, beside what `windlass plan` predicted of it and
beside the predicted limit (Amdahl's law: sparse products take the kept share of the dense ones'
time, everything else what it takes). It also shows memory and the last checkpoint: of what was
sparse, and by how much it fell beside the kept share of those weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import append_row

WARM = 1
DENSE, SPARSE = "dense", "sparse"


def overrides(options: argparse.Namespace, kind: str, precision: str) -> list[str]:
    """The overrides of one run."""
    steps = WARM + options.rounds
    found = [
        f"train.batch={options.batch}", f"train.sequence={options.sequence}",
        f"train.steps={steps}", f"train.save_every={steps}", "train.evaluate_sequences=0",
        "data.tokenizer=byte",
        f"precision={precision}", *options.overrides,
    ]  # fmt: skip
    if kind == SPARSE:
        found += [f"sparsity.level={options.level}", f"sparsity.block={options.block}"]
    return found


def take_turns(model: str, arguments: list[str]) -> None:
    """Runs in a contestant's process: plans, then takes a step for each input line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    import windlass
    from windlass import api

    planned = windlass.plan(model, *arguments)
    speedup = api.sparse_speedup(planned)
    peak = planned.prediction.peaks[0]

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(
        seconds=planned.prediction.step_seconds,
        peak_bytes=peak.peak_bytes,
        speedup=speedup and speedup.speedup,
        limit=speedup and speedup.limit,
        parameters=planned.graph.parameter_count,
        weights=sum(
            run.count * parameter.count
            for run in planned.graph.layer_runs
            for parameter in planned.graph.kinds[run.kind].parameters
            if is_projection(run.kind, parameter.name, parameter.shape)
        ),
        plan=f"{planned.plan.precision}, compiled={planned.plan.compile}, "
        f"recompute={planned.plan.recompute}",
    )
    with tempfile.TemporaryDirectory(dir=Path.cwd(), suffix=".tmp") as folder:
        run = Path(folder) / "run"
        steps = iter(windlass.train(planned, folder=run))
        for _ in sys.stdin:
            step = next(steps, None)
            if step is not None:
                answer(seconds=step.seconds, memory_bytes=step.memory_bytes)
                continue
            files = (path for path in (run / "checkpoints").rglob("*") if path.is_file())
            answer(checkpoint_bytes=sum(path.stat().st_size for path in files))
            return


def is_projection(kind: str, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a weight of a block's linear layers, dense or sparse."""
    return "block" in kind and len(shape) > 1 and name.endswith((".weight", ".values"))


class Contestant:
    """A process that trains, one step on request.

    Args:
        model: name of the model.
        arguments: overrides of its request.
    """

    def __init__(self, model: str, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", model, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.predicted = self._answer()

    def turn(self) -> dict[str, float]:
        """Figures of the next step; after the last one, of what was saved."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Lets the process remove its run, and waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a contestant ended with {self._process.wait()}")
        return json.loads(line)


def compare(options: argparse.Namespace, precision: str) -> None:
    """Times both, prints the comparison and appends its row."""
    both = {
        kind: Contestant(options.model, overrides(options, kind, precision))
        for kind in (DENSE, SPARSE)
    }
    seconds: dict[str, list[float]] = {DENSE: [], SPARSE: []}
    memory = dict.fromkeys(both, 0.0)
    try:
        for number in range(WARM + options.rounds):
            for kind, contestant in both.items():
                step = contestant.turn()
                memory[kind] = max(memory[kind], step["memory_bytes"])
                if number >= WARM:
                    seconds[kind].append(step["seconds"])
        saved = {kind: contestant.turn()["checkpoint_bytes"] for kind, contestant in both.items()}
    finally:
        for contestant in both.values():
            contestant.end()
    dense, sparse = (both[kind].predicted for kind in (DENSE, SPARSE))
    ratios = sorted(d / s for d, s in zip(seconds[DENSE], seconds[SPARSE], strict=True))
    median = {kind: statistics.median(times) for kind, times in seconds.items()}
    ratio = statistics.median(ratios)
    kept = sparse["weights"] / dense["weights"]
    gone = dense["weights"] - sparse["weights"]
    each = (saved[DENSE] - saved[SPARSE]) / gone
    held = (memory[DENSE] - memory[SPARSE]) / gone
    row = {
        "model": options.model, "precision": precision, "level": options.level,
        "block": options.block, "tokens": options.batch * options.sequence,
        "rounds": options.rounds, "overrides": " ".join(options.overrides),
        "dense_seconds": round(median[DENSE], 4), "sparse_seconds": round(median[SPARSE], 4),
        "predicted_dense_seconds": round(dense["seconds"], 4),
        "predicted_sparse_seconds": round(sparse["seconds"], 4),
        "speedup": round(ratio, 4), "lowest": round(ratios[0], 4), "highest": round(ratios[-1], 4),
        "predicted_speedup": round(sparse["speedup"], 4), "limit": round(sparse["limit"], 4),
        "of_limit": round(ratio / sparse["limit"], 4), "kept": round(kept, 5),
        "dense_peak_bytes": round(memory[DENSE]), "sparse_peak_bytes": round(memory[SPARSE]),
        "predicted_dense_peak_bytes": dense["peak_bytes"],
        "predicted_sparse_peak_bytes": sparse["peak_bytes"],
        "dense_checkpoint_bytes": saved[DENSE], "sparse_checkpoint_bytes": saved[SPARSE],
        "checkpoint_bytes_of_each_absent_weight": round(each, 3),
        "memory_bytes_of_each_absent_weight": round(held, 3),
    }  # fmt: skip
    append_row("sparse_step", **row)
    print(
        f"{precision}: dense {median[DENSE]:.2f} s (predicted {dense['seconds']:.2f}), "
        f"sparse {median[SPARSE]:.2f} s (predicted {sparse['seconds']:.2f}; {sparse['plan']})\n"
        f"  speed-up {ratio:.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}), predicted "
        f"{sparse['speedup']:.2f} x, limit {sparse['limit']:.2f} x: {ratio / sparse['limit']:.2f} "
        f"of it\n"
        f"  weights kept {kept:.4f}; peak {memory[DENSE] / 2**20:.0f} -> "
        f"{memory[SPARSE] / 2**20:.0f} MiB (predicted {dense['peak_bytes'] / 2**20:.0f} -> "
        f"{sparse['peak_bytes'] / 2**20:.0f}); checkpoint {saved[DENSE] / 2**20:.0f} -> "
        f"{saved[SPARSE] / 2**20:.0f} MiB\n"
        f"  each absent weight saves {held:.2f} bytes of memory, of 16 with its gradient, and "
        f"{each:.2f} of the checkpoint",
        flush=True,
    )


def main() -> None:
    """Reads the command line and compares in each precision."""
    if "--child" in sys.argv[1:2]:
        take_turns(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt2-355m")
    parser.add_argument("--level", type=float, default=0.875)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    for precision in options.precision:
        compare(options, precision)


if __name__ == "__main__":
    main()
