"""Fits constants of software stacks and clusters to published tables, by the clock that plans.

    python benchmarks/calibrate.py TABLES [--seed 7] [--only STACK]

TABLES is a folder of tables of published runs (`docs/design/accuracy.md` lists their columns). Rows
are selected evenly over configurations and shapes, starting at a row that the seed decides, so that
no measured number has an influence. The script writes constants, their sources and the selected
rows into `src/windlass/stacks` and `src/windlass/validation/fitted_clusters.toml`, in three minutes
on one core.
"""

import argparse
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w
from numpy.typing import NDArray

import windlass.stacks
import windlass.validation
from fitting.least_squares import Prior, fit_constants
from windlass.schema import DEVIATIONS_OF_80_PERCENT, Stack
from windlass.stacks import load_stack
from windlass.validation.csv_table import read_table
from windlass.validation.predict_run import RunPrediction, predict_run
from windlass.validation.published_run import PublishedRun
from windlass.validation.row_to_run import rows_to_runs

STACKS = Path(windlass.stacks.__file__).parent
CLUSTERS = Path(windlass.validation.__file__).parent / "fitted_clusters.toml"
_DOUBT_ROWS = 2.0
"""Pseudo-rows with the spread of rows that nothing was fitted to, for few calibration rows."""
_DOUBT = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Constants that are fitted together, and the rows that they are fitted to."""

    rows: Mapping[str, Mapping[str, int]]
    """Table -> cluster -> rows to select."""
    stacks: Mapping[str, Mapping[str, Prior]]
    """Stack -> constant -> prior."""
    clusters: Mapping[str, Mapping[str, Prior]]
    memory: Mapping[str, Mapping[str, Prior]]
    """Stack -> constant of its memory -> prior."""

    @property
    def priors(self) -> dict[tuple[str, str, str], Prior]:
        """Priors of the constants of step time, by (`stack` or `cluster`, name, constant)."""
        return {
            (sort, name, key): prior
            for sort, owners in (("stack", self.stacks), ("cluster", self.clusters))
            for name, owned in owners.items()
            for key, prior in owned.items()
        }


_MEMORY = {
    "buffer_bytes": Prior(3e9, 0.5), "allocator_share": Prior(0.06, 0.5),
    "activations": Prior(1.0, 0.15),
}  # fmt: skip
_SINGLE, _MULTI = "vtrain_single_a100.csv", "vtrain_multi_a100.csv"
_BLOOM, _TITAN = "bigscience_bloom_prequel_a100_80gb.csv", "torchtitan.csv"
_MLPERF = "mlperf_bert_resnet_v1.0_v1.1_v2.0.csv"

JOBS = (
    Job(
        rows={_SINGLE: {"vtrain": 100}, _MULTI: {"vtrain": 28}, _BLOOM: {"jean-zay": 18}},
        stacks={
            "megatron-deepspeed": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "launch_seconds": Prior(40e-6, 0.4), "pair_launches": Prior(0.2, 0.5),
                "collective_seconds": Prior(15e-6, 0.5), "message_seconds": Prior(3e-4, 0.7),
                "step_seconds": Prior(1e-3, 0.8),
            }
        },
        clusters={
            "vtrain": {
                "network": Prior(17e9, 0.3), "crowding": Prior(2.0, 1.0),
                "stragglers": Prior(0.015, 0.5),
            },
            "jean-zay": {
                "inner": Prior(150e9, 0.5), "network": Prior(5e9, 0.6),
                "crowding": Prior(1.0, 1.0), "stragglers": Prior(0.01, 0.5),
                "old_software_share": Prior(0.05, 0.5),
            },
        },
        memory={"megatron-deepspeed": _MEMORY},
    ),
    Job(
        rows={
            "korthikanti_2022.csv": {"selene-2022": 4}, "megatron_sc21.csv": {"selene-2021": 6},
        },
        stacks={
            "megatron-core": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "launch_seconds": Prior(30e-6, 0.4), "message_seconds": Prior(2e-4, 0.7),
                "collective_seconds": Prior(15e-6, 0.5), "attention_rate": Prior(1.0, 0.2),
            },
            "megatron-2021": {"products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2)},
        },
        clusters={"selene-2022": {}, "selene-2021": {"network": Prior(15e9, 0.2)}},
        memory={},
    ),
    Job(
        rows={"megatron_sc21.csv": {"selene-zero3": 3}},
        stacks={"deepspeed-zero3": {"gather_exposed": Prior(0.3, 0.5)}},
        clusters={"selene-zero3": {"network": Prior(4e9, 0.5)}},
        memory={},
    ),
    Job(
        rows={"llm_foundry_mpt.csv": {"mosaic-h100": 20, "mosaic-a100": 30}},
        stacks={
            "fsdp": {
                "products": Prior(1.0, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(1.0, 0.2), "launch_seconds": Prior(12e-6, 0.4),
                "gather_exposed": Prior(0.1, 0.8), "step_seconds": Prior(2e-2, 0.8),
            }
        },
        clusters={
            "mosaic-h100": {"network": Prior(40e9, 0.2)},
            "mosaic-a100": {"network": Prior(18e9, 0.2)},
        },
        memory={},
    ),
    Job(
        rows={_TITAN: {"torchtitan": 8, "torchtitan-rowwise": 1}},
        stacks={
            "torchtitan": {
                "products": Prior(0.95, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(1.0, 0.1), "cast_bytes": Prior(6.0, 0.3),
                "tensor_overlap": Prior(0.6, 0.2), "context_attention": Prior(0.5, 0.5),
                "gather_exposed": Prior(0.05, 0.8),
            },
            "torchtitan-rowwise": {"cast_bytes": Prior(18.0, 0.3)},
        },
        clusters={"torchtitan": {}, "torchtitan-rowwise": {}},
        memory={"torchtitan": _MEMORY},
    ),
    Job(
        rows={"recent_h100_gb200.csv": {"nemo": 6}},
        stacks={
            "nemo": {
                "products": Prior(0.92, 0.07), "attention_rate": Prior(1.0, 0.1),
                "traffic": Prior(1.0, 0.2), "cast_bytes": Prior(6.0, 0.3),
            }
        },
        clusters={"nemo": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"mlperf": 18}},
        stacks={
            "mlperf-bert": {
                "products": Prior(0.9, 0.1), "traffic": Prior(1.0, 0.2),
                "attention_rate": Prior(0.8, 0.3), "step_seconds": Prior(2e-3, 0.8),
            }
        },
        clusters={"mlperf": {}},
        memory={},
    ),
    Job(  # with what an op costs on IPUs and the curve of their products, in their device files
        rows={_MLPERF: {"mlperf-ipu": 4}},
        stacks={"popart": {"step_seconds": Prior(0.2, 0.7)}},
        clusters={"mlperf-ipu": {}},
        memory={},
    ),
    Job(
        rows={"graphcore_performance.csv": {"ipu": 16}},
        stacks={
            "poptorch": {
                "products": Prior(1.0, 0.3), "launch_seconds": Prior(4.9e-6, 0.5),
                "step_seconds": Prior(0.15, 0.7),
            }
        },
        clusters={"ipu": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"resnet-ipu": 4}},
        stacks={
            "tensorflow-ipu": {"products": Prior(1.0, 0.3), "step_seconds": Prior(2e-3, 0.8)}
        },
        clusters={"resnet-ipu": {}},
        memory={},
    ),
    Job(
        rows={_MLPERF: {"resnet": 18}},
        stacks={"mxnet": {"products": Prior(0.8, 0.3), "step_seconds": Prior(1e-3, 0.8)}},
        clusters={"resnet": {}},
        memory={},
    ),
    Job(
        rows={"cerebras.csv": {"cerebras": 2}},
        stacks={"modelzoo": {"products": Prior(1.0, 0.5), "step_seconds": Prior(2e-2, 0.8)}},
        clusters={"cerebras": {}},
        memory={},
    ),
)  # fmt: skip

Constants = Mapping[tuple[str, str, str], float]
"""(`stack`, `memory` or `cluster`, name, constant) -> value."""
Column = NDArray[np.float64]


def main() -> None:
    """Reads the command line and fits every job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="fit only the jobs with this stack or cluster")
    options = parser.parse_args()
    fitted: dict[str, dict[str, object]] = tomllib.loads(CLUSTERS.read_text(encoding="utf-8"))
    for job in JOBS:
        if options.only and options.only not in {*job.stacks, *job.clusters}:
            continue
        runs, words = calibration_rows(job, options.tables, options.seed)
        timed = [run for run in runs if run.step_seconds]
        found = fit_steps(timed, job.priors)
        held = {
            ("memory", name, key): prior
            for name, owned in job.memory.items()
            for key, prior in owned.items()
        }
        sized = [run for run in runs if run.peak_bytes]
        if held:
            found |= fit(sized, held, lambda run: run.peak_bytes, lambda one: one.peak_bytes)
        _report(job, runs, found, words, options.seed, fitted)
    CLUSTERS.write_text(tomli_w.dumps(fitted), encoding="utf-8")


def calibration_rows(
    job: Job, tables: Path, seed: int
) -> tuple[list[PublishedRun], dict[str, str]]:
    """The selected runs, and for each cluster its rows in words."""
    selected: list[PublishedRun] = []
    words: dict[str, list[str]] = {}
    for table, clusters in job.rows.items():
        runs = [
            run
            for run in rows_to_runs(read_table(tables / table).rows)
            if isinstance(run, PublishedRun) and (run.step_seconds or run.peak_bytes)
        ]
        for cluster, count in clusters.items():
            of_cluster = [run for run in runs if run.cluster.name == cluster]
            some = calibration_runs(of_cluster, count, seed)
            selected += some
            words.setdefault(cluster, []).append(
                f"{len(some)} of {len(of_cluster)} rows of {table}"
            )
    return selected, {name: " and ".join(parts) for name, parts in words.items()}


def calibration_runs(runs: Sequence[PublishedRun], count: int, seed: int) -> list[PublishedRun]:
    """`count` runs, spread evenly over configurations and shapes, or all if there are fewer."""
    ordered = sorted(runs, key=_sort_key)
    if len(ordered) <= count:
        return ordered
    start, step = random.Random(seed).random(), len(ordered) / count
    return [ordered[int((turn + start) * step)] for turn in range(count)]


def _sort_key(run: PublishedRun) -> tuple[object, ...]:
    cut, shape = run.config, run.shape
    return (
        run.family, shape.width, shape.heads, cut.tensor, cut.pipeline, cut.recompute_share,
        shape.sequence, cut.micro, cut.replicas, shape.layers, run.key,
    )  # fmt: skip


def with_constants(run: PublishedRun, constants: Constants) -> tuple[PublishedRun, Stack]:
    """A run with some constants of its cluster and stack replaced."""

    def of(sort: str, name: str) -> dict[str, float]:
        return {key[2]: value for key, value in constants.items() if key[:2] == (sort, name)}

    cluster = run.cluster.model_copy(update=of("cluster", run.cluster.name))
    stack = load_stack(cluster.stack)
    memory = stack.memory.model_copy(update=of("memory", stack.name))
    stack = stack.model_copy(update={**of("stack", stack.name), "memory": memory})
    return replace(run, cluster=cluster), stack


def predict(run: PublishedRun, constants: Constants) -> RunPrediction:
    """The prediction of a run with some constants replaced."""
    changed, stack = with_constants(run, constants)
    return predict_run(changed, lambda _: stack)


def fit_steps(
    runs: Sequence[PublishedRun], priors: Mapping[tuple[str, str, str], Prior]
) -> dict[tuple[str, str, str], float]:
    """Constants fitted to the step times of some runs."""
    return fit(runs, priors, lambda run: run.step_seconds, lambda one: one.step_seconds)


def fit(
    runs: Sequence[PublishedRun],
    priors: Mapping[tuple[str, str, str], Prior],
    measured: Callable[[PublishedRun], float | None],
    predicted: Callable[[RunPrediction], float | None],
) -> dict[tuple[str, str, str], float]:
    """The most probable constants of runs, each in the configuration that the priors predict.

    Args:
        runs: runs whose values were measured.
        priors: prior of each constant.
        measured: a run's measured value.
        predicted: the same value of a prediction.
    """
    names = {".".join(key): key for key in priors}
    start = {key: prior.value for key, prior in priors.items()}
    settled = [replace(run, config=predict(run, start).config, candidates=()) for run in runs]

    def law(values: Mapping[str, float]) -> Column:
        given = {names[name]: value for name, value in values.items()}
        return np.array([predicted(predict(run, given)) for run in settled], dtype=float)

    goal = np.array([measured(run) for run in runs], dtype=float)
    found = fit_constants(law, goal, {name: priors[key] for name, key in names.items()})
    return {names[name]: value for name, value in found.items()}


def _report(
    job: Job, runs: Sequence[PublishedRun], found: Constants, words: Mapping[str, str], seed: int,
    fitted: dict[str, dict[str, object]],
) -> None:  # fmt: skip
    """Prints a job's constants and writes them to the files of its stacks and clusters."""
    everything = " and ".join(dict.fromkeys(words.values()))
    for name in {*job.stacks, *job.memory}:
        own = [run for run in runs if run.cluster.stack == name]
        values = {key[2]: value for key, value in found.items() if key[:2] == ("stack", name)}
        memory = {key[2]: value for key, value in found.items() if key[:2] == ("memory", name)}
        _write_stack(name, values, memory, f"to step times, {everything}, seed {seed}", own, found)
    for name in job.clusters:
        own = [run for run in runs if run.cluster.name == name]
        values = {key[2]: value for key, value in found.items() if key[:2] == ("cluster", name)}
        time, memory_deviation = deviations(own, found)
        fitted[name] = {
            **{key: float(f"{value:.4g}") for key, value in values.items()},
            "deviation": round(time, 4),
            **({"memory_deviation": round(memory_deviation, 4)} if memory_deviation else {}),
            "fitted_to": f"{words[name]}, seed {seed}",
            "rows": sorted(run.key for run in own),
        }
        print(f"{name:20} {len(own):4} rows, deviation {time:.3f}")


def deviations(runs: Sequence[PublishedRun], found: Constants) -> tuple[float, float | None]:
    """Standard deviations of log(measured / predicted) of step time and of peak memory."""
    every = [(run, predict(run, found)) for run in runs]
    time = [one.step_seconds / run.step_seconds for run, one in every if run.step_seconds]
    held = [
        one.peak_bytes / run.peak_bytes for run, one in every if run.peak_bytes and one.peak_bytes
    ]
    return _deviation(time), _deviation(held) if held else None


def _deviation(ratios: Sequence[float]) -> float:
    """Deviation whose 80 % interval holds 80 % of the rows, and a few that were never fitted."""
    errors = np.sort(np.abs(np.log(ratios)))
    half = float(np.quantile(errors, 0.8)) / DEVIATIONS_OF_80_PERCENT
    count = len(errors)
    return float(np.sqrt((count * half**2 + _DOUBT_ROWS * _DOUBT**2) / (count + _DOUBT_ROWS)))


def _write_stack(
    name: str, values: Mapping[str, float], memory: Mapping[str, float], source: str,
    runs: Sequence[PublishedRun], found: Constants,
) -> None:  # fmt: skip
    path = STACKS / f"{name}.toml"
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    time, memory_deviation = deviations(runs, found)
    for key, value in {**values, "deviation": time}.items():
        document[key] = float(f"{value:.4g}")
        document.setdefault("sources", {})[key] = {"how": "fitted", "source": source}
    if memory:
        document["memory"] = {
            **document.get("memory", {}),
            **{key: float(f"{value:.4g}") for key, value in memory.items()},
        }
        document["memory_deviation"] = float(f"{memory_deviation or _DOUBT:.4g}")
        document["sources"]["memory.*"] = {"how": "fitted", "source": source}
        document["sources"]["memory_deviation"] = {"how": "fitted", "source": source}
    tables: dict[str, object] = {
        key: document.pop(key) for key in ("memory", "can", "sources") if key in document
    }
    path.write_text(tomli_w.dumps({**document, **tables}), encoding="utf-8")
    print(f"{name:20}", {key: float(f"{value:.4g}") for key, value in {**values, **memory}.items()})


if __name__ == "__main__":
    main()
