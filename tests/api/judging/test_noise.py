from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.errors import RequestError

MODEL, *OVERRIDES = TINY


@pytest.mark.slow
def test_a_noise_floor_is_a_group_of_runs_that_are_peers_of_later_ones(home: Path):
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=200")
    planned = windlass.plan(MODEL, *words)
    floor = windlass.noise(planned, seeds=3, steps=25, root=home / "runs")
    assert len(floor.folders) == 3
    assert 0 < floor.deviation < 1
    assert 0 < floor.loss < 0.1
    run = windlass.train(planned, root=home / "runs")
    for step in run:
        if step.step == 40:
            break
    assert windlass.judge(run.folder, root=home / "runs").peers == 3


def test_fewer_than_three_seeds_are_refused(home: Path):
    planned = windlass.plan(MODEL, *OVERRIDES, f"data.source={home / 'text'}")
    with pytest.raises(RequestError, match="say nothing of noise"):
        windlass.noise(planned, seeds=2, root=home / "runs")
