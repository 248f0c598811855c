"""Published best parallelizations, predicted under their software, beside the planner's own pick.

    python benchmarks/published_mappings.py [NAME ...] [--keep]

Each case is a run that its authors published as their best: model, machine, software stack and
parallelism are pinned and predicted, then all but the batch is left open. Prints both as rows of a
Markdown table; `--keep` appends them to the results.
"""

import argparse
import time
from dataclasses import dataclass

import windlass
from results import append_row
from windlass.errors import WindlassError
from windlass.schema import Plan

KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, table 5"
NEMO = "NVIDIA, NeMo and Megatron-Bridge performance pages, 2024 to 2025"
MLPERF = "MLPerf Training v1.0 to v2.0, Graphcore"
SELECTIVE = ("recompute=selective",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """A published parallelization."""

    name: str
    model: str
    machine: str
    stack: str | None
    """None means Windlass's own runtime."""
    open: tuple[str, ...]
    """What the free pick keeps: batch, sequence, sizes."""
    pinned: tuple[str, ...]
    """The published parallelization."""
    measured_seconds: float | None
    """A step's time; None if it was not published."""
    source: str


def mapping(
    name: str,
    model: str,
    machine: str,
    batch: int,
    cut: tuple[int, int, int, int, int],
    seconds: float,
    *more: str,
    stack: str,
    source: str,
    dials: tuple[str, ...] = (),
) -> Mapping:
    """A case of GPUs; `cut` is pipeline, virtual stages, tensor, context and data."""
    pipeline, chunks, tensor, context, data = cut
    sequence = 8192 if model.startswith("llama") else 2048
    pins = {
        "parallel.pipeline": pipeline, "parallel.tensor": tensor, "parallel.data": data,
        "parallel.virtual_stages": chunks,
        "sharding.optimizer": data * context if stack == "nemo" else 1,
    }  # fmt: skip
    if context > 1:
        pins["parallel.context"] = context
    return Mapping(
        name=name, model=model, machine=machine, stack=stack,
        open=(f"train.batch={batch}", f"train.sequence={sequence}", *dials),
        pinned=(*(f"{key}={value}" for key, value in pins.items()), *more),
        measured_seconds=seconds, source=source,
    )  # fmt: skip


def megatron(
    name: str, model: str, hosts: int, batch: int, cut: tuple[int, int, int, int, int], s: float,
    micro: int = 1,
) -> Mapping:  # fmt: skip
    """A case of Megatron-LM with sequence parallelism and selective recompute."""
    return mapping(
        name, model, f"dgx-a100-80gb:{hosts}", batch, cut, s, f"batch.micro={micro}", *SELECTIVE,
        stack="megatron-core", source=KORTHIKANTI,
        dials=("model.vocabulary=51200",),
    )  # fmt: skip


def nemo(
    name: str, model: str, hosts: int, batch: int, cut: tuple[int, int, int, int, int], s: float
) -> Mapping:
    """A case of NeMo in bfloat16."""
    dials = ("model.vocabulary=51200",) if model.startswith("gpt") else ()
    return mapping(
        name, model, f"dgx-h100:{hosts}", batch, cut, s, "batch.micro=1", "recompute=none",
        stack="nemo", source=NEMO, dials=dials,
    )  # fmt: skip


MAPPINGS = (
    megatron("22B, 8 A100", "megatron-22b", 1, 4, (1, 1, 8, 1, 1), 1.10, micro=4),
    megatron("175B, 64 A100", "gpt3-175b", 8, 64, (8, 3, 8, 1, 1), 13.75),
    megatron("530B, 280 A100", "megatron-530b", 35, 280, (35, 3, 8, 1, 1), 37.83),
    megatron("1T, 512 A100", "megatron-1t", 64, 512, (64, 1, 8, 1, 1), 71.49),
    nemo("Llama 8B, 8 H100", "llama3-8b", 1, 128, (1, 1, 1, 2, 4), 12.78),
    nemo("Llama 70B, 64 H100", "llama3-70b", 8, 128, (4, 5, 4, 2, 2), 14.61),
    nemo("Llama 405B, 576 H100", "llama3-405b", 72, 252, (9, 7, 8, 2, 4), 17.5),
    nemo("GPT-3 175B, 128 H100", "gpt3-175b", 16, 256, (8, 12, 4, 1, 4), 8.309),
    Mapping(
        name="BERT-Large, POD16", model="bert-large", machine="ipu-pod16", stack=None,
        open=("train.batch=1536", "train.sequence=512"),
        pinned=(
            "parallel.pipeline=4", "parallel.tensor=1", "parallel.data=4", "batch.micro=2",
            "sharding.optimizer=4",
        ),
        measured_seconds=2.01, source=f"{MLPERF} v1.1",
    ),
    Mapping(
        name="GPT-3 175B, POD256", model="gpt3-175b", machine="ipu-pod256", stack=None,
        open=("train.batch=128", "train.sequence=2048"),
        pinned=(
            "parallel.pipeline=1", "parallel.tensor=8x8", "parallel.data=4", "batch.micro=1",
        ),
        measured_seconds=None, source="graphcore/examples, gpt3_175B_pod256",
    ),
)  # fmt: skip


def main() -> None:
    """Plans each case twice and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--keep", action="store_true", help="append the rows to the results")
    options = parser.parse_args()
    heads = "published | measured | predicted | error | the planner's pick | predicted | faster"
    print(f"| | {heads} |")
    print("|---|---|---|---|---|---|---|---|")
    for each in MAPPINGS:
        if not options.names or any(name in each.name for name in options.names):
            compare(each, keep=options.keep)


def compare(case: Mapping, *, keep: bool) -> None:
    """Predicts one case and prints it."""
    start = time.perf_counter()
    pinned = _planned(case, case.pinned)
    free = _planned(case, ())
    if isinstance(pinned, str) or isinstance(free, str):
        print(f"| {case.name} | {pinned if isinstance(pinned, str) else free} |", flush=True)
        return
    plan, seconds = pinned
    pick, best = free
    measured = case.measured_seconds
    error = None if measured is None else seconds / measured - 1
    cells = (
        case.name,
        show(plan),
        "not published" if measured is None else f"{measured:.2f} s",
        f"{seconds:.2f} s",
        "" if error is None else f"{100 * error:+.1f} %",
        show(pick),
        f"{best:.2f} s",
        f"{100 * (seconds / best - 1):.1f} %",
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    if keep:
        append_row(
            "published_mappings", case=case.name, stack=case.stack or "windlass",
            published=show(plan), measured_seconds=measured, predicted_seconds=round(seconds, 4),
            pick=show(pick), pick_seconds=round(best, 4),
            wall_seconds=round(time.perf_counter() - start, 1),
        )  # fmt: skip


def _planned(case: Mapping, pins: tuple[str, ...]) -> tuple[Plan, float] | str:
    """A plan and its predicted step, or why there is none."""
    try:
        planned = windlass.plan(
            case.model, *case.open, *pins, machine=case.machine, stack=case.stack, cache=False
        )
        found = planned.plan, planned.prediction.step_seconds
    except WindlassError as error:
        return str(error).replace("\n", "; ")
    return found


def show(plan: Plan) -> str:
    """`p8 v3 t8 d1, micro 1, selective`."""
    parallel = plan.parallel
    degrees = [f"p{parallel.pipeline}"]
    degrees += [f"v{parallel.virtual_stages}"] if parallel.virtual_stages > 1 else []
    degrees += [f"t{parallel.tensor}"]
    degrees += [f"c{parallel.context}"] if parallel.context else []
    degrees += [f"d{parallel.data}"]
    sharding = f"ZeRO-1 {plan.sharding.optimizer}, " if plan.sharding.optimizer > 1 else ""
    phases = max(len(stage.phases) for stage in plan.stages)
    mode = f"{phases} phases" if phases > 1 else f"recompute {plan.recompute}"
    return f"{' '.join(degrees)}, {sharding}micro {plan.batch.micro}, {mode}"


if __name__ == "__main__":
    main()
