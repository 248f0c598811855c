"""Bytes that tensor-parallel ranks send in a step, in one dimension and in grids, and step time.

    python benchmarks/tensor_grid.py [--model gpt2-124m] [--ranks 4 8 16 64] [--time 2x2]
        [--rounds 3]

Bytes are those of the step's program, which tests compare with the buffers that torch receives. The
step has one sequence. With `--time` a small model also trains on local gloo processes of one thread
each, alternately in that grid and in one dimension with as many ranks. The output is the median of
each and their ratio: below 1 the grid is faster.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from program_bytes import sent_bytes_by_kind
from results import append_row
from windlass.capture.capture_layers import capture_graph, capture_tensor_shards
from windlass.models.build import build_layer_stack
from windlass.program.validate_plan import tensor_parallel_errors
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Parallelism, Plan, Stage
from windlass.schema.tensor_grid import grid_columns, parse_tensor_degree, tensor_degree

STEPS, WARM = 8, 3
TIMED_MODEL = "gpt-tiny"
HEADS = 4
"""Attention heads of the timed model; its own six are not divisible by 4 or 8 ranks."""


def grid_shapes(ranks: int) -> tuple[int, ...]:
    """One dimension, and every grid of so many ranks with at least as many rows as columns."""
    columns = [c for c in (1, 2, 4, 8, 16) if ranks % c == 0 and ranks // c >= c]
    return tuple(tensor_degree(ranks // c, c) for c in columns)


def sent_bytes(graph: Graph, shape: int, sequence: int) -> int:
    """Bytes that the first rank sends in a step of one sequence in bfloat16."""
    plan = Plan(
        graph=graph.label, machine="any@0", precision="bfloat16",
        parallel=Parallelism(tensor=shape), batch=Batch(sequence=sequence, micro=1),
        stages=(Stage(phases=((0, graph.layers),)),),
    )  # fmt: skip
    return sum(sent_bytes_by_kind(plan, graph, 0).values())


def step_seconds(shape: int, folder: Path) -> float:
    """Median seconds of a step of the small model."""
    import windlass

    planned = windlass.plan(
        TIMED_MODEL, f"parallel.tensor={shape}", f"model.heads={HEADS}", "train.batch=8",
        "batch.micro=4", f"train.steps={STEPS}", "precision=float32", "compile=false",
        "recompute=none", "train.evaluate_sequences=0", f"train.save_every={STEPS}",
        "model.dropout=0",
    )  # fmt: skip
    steps = [step.seconds for step in windlass.train(planned, folder=folder)]
    return statistics.median(steps[WARM:])


def main() -> None:
    """Reads the command line, counts bytes and, if asked, times steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 64])
    parser.add_argument("--time", type=parse_tensor_degree)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count_bytes(options.model, options.ranks)
    if options.time is not None:
        time_grid(options.time, options.rounds)


def count_bytes(model: str, degrees: list[int]) -> None:
    """Prints what the first rank of a model sends, for each degree in every grid shape."""
    stack = build_layer_stack(model, {}, device="meta")
    shapes = [shape for ranks in degrees for shape in grid_shapes(ranks)]
    graph = capture_tensor_shards(stack, capture_graph(stack), shapes)
    sequence = graph.max_sequence or 1024
    for ranks in degrees:
        one_dimension: int | None = None
        for shape in grid_shapes(ranks):
            errors = tuple(tensor_parallel_errors(shape, sequence, graph))
            if errors:
                print(f"{model} {shape}: {errors[0]}")
                continue
            nbytes = sent_bytes(graph, shape, sequence)
            one_dimension = nbytes if grid_columns(shape) == 1 else one_dimension
            ratio = nbytes / one_dimension if one_dimension else None
            comparison = f", {ratio:.2f} of one dimension" if ratio else ""
            print(f"{model} {shape}: {nbytes / 1e6:.1f} MB a step{comparison}")
            append_row(
                "tensor_grid", model=model, slices=str(shape), sequence=sequence, bytes=nbytes,
                ratio=ratio, seconds=None, seconds_ratio=None,
            )  # fmt: skip


def time_grid(shape: int, rounds: int) -> None:
    """Prints the step time of a grid and of one dimension, measured alternately."""
    seconds: dict[int, list[float]] = {int(shape): [], shape: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for degree, times in seconds.items():
                times.append(step_seconds(degree, Path(folder) / f"{degree}-{number}"))
    one_dimension, grid = (statistics.median(times) for times in seconds.values())
    ratio = grid / one_dimension
    print(
        f"{TIMED_MODEL}: {shape} {grid:.3f} s a step, {one_dimension:.3f} s in one dimension: "
        f"{ratio:.2f}"
    )
    append_row(
        "tensor_grid", model=TIMED_MODEL, slices=str(shape), sequence=256, bytes=None, ratio=None,
        seconds=grid, seconds_ratio=ratio,
    )  # fmt: skip


if __name__ == "__main__":
    main()
