"""Two ranks on the simulated device: whatever streams do late, no bit of a run changes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from factories import catalog_graph, tiny_machine, tiny_plan, write_documents
from forked_runs import beside_tests
from simulated_device import SCHEDULES, Site
from windlass.schema.plan import Offload, Plan

SCRIPT = Path(__file__).with_name("simulated_rank.py")
SHAPE = {"layers": 2, "width": 16, "heads": 2, "sequence": 8, "dropout": 0.1, "vocabulary": 257}
SECONDS_TO_START, SECONDS_OF_JOB = 80, 60
"""Processes whose jobs have not ended by then hang, also on cores that have other work."""

ON_HOST = Offload(optimizer="host")
SHARDED: dict[str, dict[str, Any]] = {
    "replicas": {"data": 2, "micro": 1, "accumulation": 2},
    "parameters and optimizer": {"data": 2, "micro": 1, "accumulation": 2, "sharding": (2, 2)},
    "optimizer": {"data": 2, "sharding": (1, 2)},
    "sharded on host": {"data": 2, "sharding": (2, 2), "offload": ON_HOST},
    "stages": {"pipeline": 2, "micro": 1, "accumulation": 4},
    "stages of zero bubble": {
        "pipeline": 2,
        "micro": 1,
        "accumulation": 4,
        "schedule": "zero-bubble",
    },
}

MANY = 500
"""Operations of a run, at least: one that puts none off would prove nothing."""

MESSAGES = 4
"""Where a stage waits for one: a pass, tied weights, their gradient, a pass of an evaluation."""

Job = tuple[Plan, str, Site | None]


def plan(name: str) -> Plan:
    graph = catalog_graph("gpt-tiny", **SHAPE)
    return tiny_plan(graph, tiny_machine(host="1 GiB", devices=2), sequence=8, **SHARDED[name])


def run_jobs(jobs: Sequence[Job], folder: Path) -> list[list[dict[str, Any]]]:
    """What each job left on each rank."""
    (folder / "text").mkdir()
    write_documents(folder / "text")
    listed = [(each.model_dump(mode="json"), schedule, site) for each, schedule, site in jobs]
    (folder / "jobs.json").write_text(json.dumps(listed))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], env=beside_tests(),
        capture_output=True, text=True, timeout=SECONDS_TO_START + SECONDS_OF_JOB * len(jobs),
        start_new_session=True, check=False,
    )  # fmt: skip
    files = [folder / f"results{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-4000:]
    by_rank = [json.loads(file.read_text()) for file in files]
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def left(result: dict[str, Any]) -> tuple[object, object]:
    """What must not depend on the schedule."""
    return result["losses"], result["files"]


def assert_unchanged(names: Sequence[str], schedules: Sequence[str], folder: Path) -> None:
    jobs: list[Job] = [
        (plan(name), schedule, None) for name in names for schedule in ("at once", *schedules)
    ]
    results = run_jobs(jobs, folder)
    expected: list[dict[str, Any]] = []
    for (_, schedule, _), ranks in zip(jobs, results, strict=True):
        expected = ranks if schedule == "at once" else expected
        for rank, result in enumerate(ranks):
            assert result["faults"] == [], (schedule, rank)
            assert left(result) == left(expected[rank]), (schedule, rank)
            assert result["operations"] > MANY


@pytest.mark.slow
def test_overlapped_collectives_change_no_bit(tmp_path: Path):
    assert_unchanged(["parameters and optimizer"], ["late", "sides early"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_overlapped_collectives_change_no_bit_under_any_schedule(name: str, tmp_path: Path):
    assert_unchanged([name], [schedule.name for schedule in SCHEDULES], tmp_path)


@pytest.mark.slow
def test_each_wait_for_a_message_that_is_left_out_is_noticed(tmp_path: Path):
    # Clocks notice it whatever runs when; in another order the run breaks, which leaves nothing.
    stages = plan("stages")
    whole, others = tmp_path / "whole", tmp_path / "others"
    whole.mkdir()
    others.mkdir()
    expected = run_jobs([(stages, "at once", None)], whole)[0]
    sites = sorted(
        {
            tuple(site)
            for result in expected
            for site in result["sites"]
            if site[0] == "wait" and site[1].startswith("ProcessGroups.receive+")
        }
    )
    assert len(sites) == MESSAGES
    results = run_jobs([(stages, "at once", site) for site in sites], others)
    for site, ranks in zip(sites, results, strict=True):
        assert any(result["faults"] for result in ranks), site
