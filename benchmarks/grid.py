"""What each slice sends in a step, in one dimension and in grids, and how long a step takes so.

    python benchmarks/grid.py [--model gpt2-124m] [--slices 4 8 16 64] [--time 2x2] [--rounds 3]

Bytes are those of the step's program, which tests hold against the buffers that torch is given. The
step has one sequence. With `--time` a small model also trains on local gloo processes of one thread
each, in that grid and in as many slices of one dimension by turns; the table shows medians, and the
grid's by the other's: below 1 the grid is faster.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from results import append_row
from windlass.capture.capture_layers import capture_graph, capture_tensor_shards
from windlass.models.build import build_layer_stack
from windlass.program.communication_volume import sent_bytes_by_kind
from windlass.program.validate_plan import tensor_parallel_errors
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Parallelism, Plan, Stage
from windlass.schema.tensor_grid import grid_columns, parse_tensor_degree, tensor_grid

STEPS, WARM = 8, 3
TIMED = "gpt-tiny"
HEADS = 4
"""Of the model that trains: its own six would not divide by all slices, only by rows."""


def shapes(slices: int) -> tuple[int, ...]:
    """One dimension, and every grid of so many slices with at least as many rows as columns."""
    columns = [c for c in (1, 2, 4, 8, 16) if slices % c == 0 and slices // c >= c]
    return tuple(tensor_grid(slices // c, c) for c in columns)


def sent(graph: Graph, slices: int, sequence: int) -> int:
    """Bytes that the first slice sends in a step of one sequence in bfloat16."""
    plan = Plan(
        graph=graph.label, machine="any@0", precision="bfloat16", parallel=Parallelism(tensor=slices),
        batch=Batch(sequence=sequence, micro=1), stages=(Stage(phases=((0, graph.layers),)),),
    )  # fmt: skip
    return sum(sent_bytes_by_kind(plan, graph, 0).values())


def seconds(slices: int, folder: Path) -> float:
    """Median seconds of a step of the small model."""
    import windlass

    planned = windlass.plan(
        TIMED, f"parallel.tensor={slices}", f"model.heads={HEADS}", "train.batch=8", "batch.micro=4",
        f"train.steps={STEPS}", "precision=float32", "compile=false", "recompute=none",
        "train.evaluate_sequences=0", f"train.save_every={STEPS}", "model.dropout=0",
    )  # fmt: skip
    steps = [step.seconds for step in windlass.train(planned, folder=folder)]
    return statistics.median(steps[WARM:])


def main() -> None:
    """Reads the words of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--slices", type=int, nargs="*", default=[4, 8, 16, 64])
    parser.add_argument("--time", type=parse_tensor_degree)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    count(asked.model, asked.slices)
    if asked.time is not None:
        timed(asked.time, asked.rounds)


def count(model: str, degrees: list[int]) -> None:
    """What slices of a model send, for each number of them in every shape."""
    chain = build_layer_stack(model, {}, device="meta")
    cuts = [shape for slices in degrees for shape in shapes(slices)]
    graph = capture_tensor_shards(chain, capture_graph(chain), cuts)
    sequence = graph.max_sequence or 1024
    for slices in degrees:
        line: int | None = None
        for shape in shapes(slices):
            faults = tuple(tensor_parallel_errors(shape, sequence, graph))
            if faults:
                print(f"{model} {shape}: {faults[0]}")
                continue
            nbytes = sent(graph, shape, sequence)
            line = nbytes if grid_columns(shape) == 1 else line
            ratio = nbytes / line if line else None
            beside = f", {ratio:.2f} of one dimension" if ratio else ""
            print(f"{model} {shape}: {nbytes / 1e6:.1f} MB a step{beside}")
            append_row(
                "grid", model=model, slices=str(shape), sequence=sequence, bytes=nbytes,
                ratio=ratio, seconds=None, seconds_ratio=None,
            )  # fmt: skip


def timed(shape: int, rounds: int) -> None:
    """A grid and one dimension by turns."""
    found: dict[int, list[float]] = {int(shape): [], shape: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for slices, each in found.items():
                each.append(seconds(slices, Path(folder) / f"{slices}-{turn}"))
    line, ours = (statistics.median(each) for each in found.values())
    print(f"{TIMED}: {shape} {ours:.3f} s a step, {line:.3f} s in one dimension: {ours / line:.2f}")
    append_row(
        "grid", model=TIMED, slices=str(shape), sequence=256, bytes=None, ratio=None,
        seconds=ours, seconds_ratio=ours / line,
    )  # fmt: skip


if __name__ == "__main__":
    main()
