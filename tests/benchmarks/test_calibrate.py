"""Calibration of stacks: which rows are chosen, and what is found from them."""

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calibrate
from calibrate import (
    JOBS,
    Constants,
    Spread,
    calibration_rows,
    calibration_runs,
    fit_steps,
    predict,
    with_constants,
)
from fitting.least_squares import Prior
from validation.made_tables import run_of
from windlass.stacks import load_stack
from windlass.validation.clusters import clusters
from windlass.validation.published_run import PublishedRun

FOUND = 0.05
"""Two constants from 8 exact rows, whose priors pull a little."""
STACK = "megatron-deepspeed"
TABLES = Path(os.environ.get("WINDLASS_TABLES", "nowhere"))


def runs_of(folder: Path) -> list[PublishedRun]:
    return [
        run_of(folder, t=t, d=64 // t, microbatch=b, layers=layers)
        for t in (1, 2, 4, 8) for b in (1, 8) for layers in (12, 30)
    ]  # fmt: skip


def deviation(runs: list[PublishedRun], constants: Constants, leverages: dict[str, float]) -> float:
    weights = {run.key: 1.0 for run in runs}
    return Spread(constants, weights, leverages, {}).deviations(runs)[0]


def test_calibration_rows_do_not_depend_on_what_was_measured(tmp_path: Path):
    runs = runs_of(tmp_path)
    others = [replace(run, step_seconds=1.0, peak_bytes=1e9) for run in reversed(runs)]

    chosen = {run.key for run in calibration_runs(runs, 6, seed=1)}

    assert len(chosen) == 6
    assert chosen == {run.key for run in calibration_runs(others, 6, seed=1)}
    assert chosen != {run.key for run in calibration_runs(runs, 6, seed=2)}


def test_a_stacks_constants_are_found_again_from_priors_that_are_off(tmp_path: Path):
    made = {("stack", STACK, "products"): 0.8, ("stack", STACK, "launch_seconds"): 9e-5}
    few = runs_of(tmp_path)[:4] + runs_of(tmp_path)[-4:]
    runs = [replace(run, step_seconds=predict(run, made).step_seconds) for run in few]
    priors = {key: Prior(value * 1.4, 0.5) for key, value in made.items()}

    found, leverages = fit_steps(runs, priors)

    assert found == pytest.approx(made, rel=FOUND)
    assert deviation(runs, made, leverages) < deviation(runs, {}, leverages)
    assert all(0 <= leverage < 1 for leverage in leverages.values())


def test_constants_replace_those_of_their_own_stack_and_cluster_alone(tmp_path: Path):
    run = run_of(tmp_path)

    changed, stack = with_constants(
        run,
        {("stack", STACK, "products"): 0.5, ("cluster", "vtrain", "network"): 1e9,
         ("memory", STACK, "activations"): 2.0, ("stack", "nemo", "traffic"): 0.1},
    )  # fmt: skip

    own = load_stack(STACK)
    assert (stack.products, stack.traffic) == (0.5, own.traffic)
    assert stack.memory.activations == 2.0
    assert changed.cluster == run.cluster.model_copy(update={"network": 1e9})


def test_few_rows_that_happen_to_fit_do_not_make_a_narrow_interval(tmp_path: Path):
    run = run_of(tmp_path)
    exact = replace(run, step_seconds=predict(run, {}).step_seconds)

    few, many = (deviation([exact] * count, {}, {}) for count in (2, 50))

    assert many < few / 3


def test_every_fitted_cluster_is_one_that_rows_are_matched_with():
    fitted = tomllib.loads(calibrate.CLUSTERS.read_text(encoding="utf-8"))
    asked = {name for job in JOBS for of_table in job.rows.values() for name in of_table}

    known = {cluster.name: cluster for cluster in clusters()}
    assert set(fitted) <= asked <= set(known)
    for name, table in fitted.items():
        assert known[name].rows == tuple(table["rows"])
        assert known[name].fitted_to


def test_constants_move_no_further_than_their_priors_allow():
    spreads = 5.0  # beyond that a term is missing
    for job in JOBS:
        for name, priors in job.stacks.items():
            stack = load_stack(name)
            for key, prior in priors.items():
                value = getattr(stack, key)
                if value and prior.value:
                    assert abs(np.log(value / prior.value)) <= spreads * prior.spread, (name, key)


@pytest.mark.skipif(not TABLES.is_dir(), reason="WINDLASS_TABLES names no folder")
def test_the_rows_that_are_kept_are_those_that_the_seed_selects():
    chosen: dict[str, set[str]] = {}
    for job in JOBS:
        for run in calibration_rows(job, TABLES, seed=7)[0]:
            chosen.setdefault(run.cluster.name, set()).add(run.key)

    assert chosen == {each.name: set(each.rows) for each in clusters() if each.rows}
