"""Fits constants of software stacks and clusters to published tables, by the clock that plans.

    python benchmarks/calibrate.py TABLES [--seed 7] [--only STACK]

TABLES is a folder of tables of published runs (`docs/design/accuracy.md` lists their columns). Rows
are selected evenly over configurations and shapes, starting at a row that the seed decides, so that
no measured number has an influence. The script writes constants, their sources and the selected
rows into `src/windlass/stacks` and `src/windlass/validation/fitted_clusters.toml`, in three minutes
on one core.
"""

import argparse
import json
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray

import windlass.stacks
import windlass.validation
from fitting.jobs import JOBS, Job
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
        runs, words, weights = calibration_rows(job, options.tables, options.seed)
        timed = [run for run in runs if run.step_seconds]
        found, pull = fit_steps(timed, job.priors)
        held = {
            ("memory", name, key): prior
            for name, owned in job.memory.items()
            for key, prior in owned.items()
        }
        sized = [run for run in runs if run.peak_bytes]
        sized_pull: dict[str, float] = {}
        if held:
            constants, sized_pull = fit(
                sized, held, lambda run: run.peak_bytes, lambda one: one.peak_bytes
            )
            found |= constants
        spread = Spread(found, weights, pull, sized_pull)
        _report(job, runs, spread, words, options.seed, fitted)
    CLUSTERS.write_text(tomli_w.dumps(fitted), encoding="utf-8")


def calibration_rows(
    job: Job, tables: Path, seed: int
) -> tuple[list[PublishedRun], dict[str, str], dict[str, float]]:
    """The selected runs, each cluster's rows in words, and how many rows each run stands for."""
    selected: list[PublishedRun] = []
    weights: dict[str, float] = {}
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
            weights |= {run.key: len(of_cluster) / len(some) for run in some}
            words.setdefault(cluster, []).append(
                f"{len(some)} of {len(of_cluster)} rows of {table}"
            )
    return selected, {name: " and ".join(parts) for name, parts in words.items()}, weights


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
        run.family, shape.width, shape.heads, cut.tensor, cut.pipeline, cut.recompute == "full",
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
) -> tuple[dict[tuple[str, str, str], float], dict[str, float]]:
    """Constants fitted to the step times of some runs, and the runs' leverages as `fit` gives."""
    return fit(runs, priors, lambda run: run.step_seconds, lambda one: one.step_seconds)


def fit(
    runs: Sequence[PublishedRun],
    priors: Mapping[tuple[str, str, str], Prior],
    measured: Callable[[PublishedRun], float | None],
    predicted: Callable[[RunPrediction], float | None],
) -> tuple[dict[tuple[str, str, str], float], dict[str, float]]:
    """The most probable constants of runs, each in the configuration that the priors predict.

    Beside them stands each run's leverage by its key: its miss would be `1 / (1 - leverage)` times
    as large if it had been left out of the fit.

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
    fitted = fit_constants(law, goal, {name: priors[key] for name, key in names.items()})
    keys = [run.key for run in runs]
    constants = {names[name]: value for name, value in fitted.constants.items()}
    return constants, dict(zip(keys, fitted.leverages.tolist(), strict=True))


class Spread(NamedTuple):
    """Fitted constants, and what tells how far from them rows are that were not fitted."""

    found: Constants
    weights: Mapping[str, float]
    """Run -> rows of its table that it stands for."""
    leverages: Mapping[str, float]
    """Run -> its pull on the constants of step time, 0 to 1."""
    memory_leverages: Mapping[str, float]
    """The same of peak memory."""

    def deviations(self, runs: Sequence[PublishedRun]) -> tuple[float, float | None]:
        """Standard deviations of log(measured / predicted) of step time and of peak memory."""
        every = [(run, predict(run, self.found)) for run in runs]
        time = [
            (run, one.step_seconds / run.step_seconds, self.leverages.get(run.key, 0.0))
            for run, one in every
            if run.step_seconds
        ]
        held = [
            (run, one.peak_bytes / run.peak_bytes, self.memory_leverages.get(run.key, 0.0))
            for run, one in every
            if run.peak_bytes and one.peak_bytes
        ]
        return self._deviation(time), self._deviation(held) if held else None

    def _deviation(self, rows: Sequence[tuple[PublishedRun, float, float]]) -> float:
        """Deviation whose 80 % interval holds 80 % of the rows, each as if left out of the fit."""
        errors = np.array([abs(np.log(ratio)) / (1.0 - pull) for _, ratio, pull in rows])
        order = np.argsort(errors)
        weights = np.array([self.weights[run.key] for run, _, _ in rows])[order]
        places = (np.cumsum(weights) - weights / 2) / weights.sum()
        half = float(np.interp(0.8, places, errors[order])) / DEVIATIONS_OF_80_PERCENT
        count = len(errors)
        return float(np.sqrt((count * half**2 + _DOUBT_ROWS * _DOUBT**2) / (count + _DOUBT_ROWS)))


def _report(
    job: Job, runs: Sequence[PublishedRun], spread: Spread, words: Mapping[str, str], seed: int,
    fitted: dict[str, dict[str, object]],
) -> None:  # fmt: skip
    """Prints a job's constants and writes them to the files of its stacks and clusters."""
    everything, found = " and ".join(dict.fromkeys(words.values())), spread.found
    for name in {*job.stacks, *job.memory}:
        own = [run for run in runs if run.cluster.stack == name]
        values = {key[2]: value for key, value in found.items() if key[:2] == ("stack", name)}
        memory = {key[2]: value for key, value in found.items() if key[:2] == ("memory", name)}
        _write_stack(name, values, memory, f"to step times, {everything}, seed {seed}", own, spread)
    for name in job.clusters:
        own = [run for run in runs if run.cluster.name == name]
        values = {key[2]: value for key, value in found.items() if key[:2] == ("cluster", name)}
        time, memory_deviation = spread.deviations(own)
        fitted[name] = {
            **{key: float(f"{value:.4g}") for key, value in values.items()},
            "deviation": round(time, 4),
            **({"memory_deviation": round(memory_deviation, 4)} if memory_deviation else {}),
            "fitted_to": f"{words[name]}, seed {seed}",
            "rows": sorted(run.key for run in own),
        }
        print(f"{name:20} {len(own):4} rows, deviation {time:.3f}")


def _write_stack(
    name: str, values: Mapping[str, float], memory: Mapping[str, float], source: str,
    runs: Sequence[PublishedRun], spread: Spread,
) -> None:  # fmt: skip
    path = STACKS / f"{name}.toml"
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = {
        key: each for keys, each in document.pop("sources", {}).items() for key in keys.split(", ")
    }
    time, memory_deviation = spread.deviations(runs)
    for key, value in {**values, "deviation": time}.items():
        document[key] = float(f"{value:.4g}")
        sources[key] = {"how": "fitted", "source": source}
    if memory:
        document["memory"] = {
            **document.get("memory", {}),
            **{key: float(f"{value:.4g}") for key, value in memory.items()},
        }
        document["memory_deviation"] = float(f"{memory_deviation or _DOUBT:.4g}")
        sources["memory.*"] = sources["memory_deviation"] = {"how": "fitted", "source": source}
    tables: dict[str, object] = {
        key: document.pop(key) for key in ("memory", "can") if key in document
    }
    text = tomli_w.dumps({**document, **tables}) + _source_lines(sources)
    path.write_text(text, encoding="utf-8")
    print(f"{name:20}", {key: float(f"{value:.4g}") for key, value in {**values, **memory}.items()})


def _source_lines(sources: Mapping[str, Mapping[str, str]]) -> str:
    """The table of sources, each of them once with all keys that it is for."""
    keys: dict[tuple[str, str], list[str]] = {}
    for key, each in sources.items():
        keys.setdefault((each["how"], each["source"]), []).append(key)
    lines = (
        f"{json.dumps(', '.join(names))} = "
        f"{{ how = {json.dumps(how)}, source = {json.dumps(source, ensure_ascii=False)} }}\n"
        for (how, source), names in keys.items()
    )
    return "\n[sources]\n" + "".join(lines)


if __name__ == "__main__":
    main()
