"""`windlass plan` of a model with sparse weights: what it says, and on which machines."""

import json

import pytest

from command_line import Windlass

SPARSE = ("gpt2-355m", "sparsity.level=0.875", "train.batch=64", "train.sequence=512")


@pytest.mark.parametrize("machine", ["dgx-a100-80gb", "cs-2:2", "sn10-8"])
def test_a_sparse_model_is_planned_for_many_devices_beside_amdahls_limit(
    windlass: Windlass, machine: str
):
    done = windlass("plan", *SPARSE, "--on", machine)
    assert done.returncode == 0, done.stderr
    for words in ("90.6 M parameters", "speed-up", "Amdahl's limit"):
        assert words in done.stdout


def test_a_sparse_plan_as_json_has_the_predicted_speed_up_and_its_limit(windlass: Windlass):
    done = windlass("plan", *SPARSE, "--on", "a100-80gb", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["sparsity"]
    assert 1 < found["speedup"] < found["limit"] < 8


def test_a_kept_plan_of_a_sparse_model_is_planned_again_from_its_file(windlass: Windlass):
    first = windlass("plan", *SPARSE, "--on", "a100-80gb", "--out", "plan.toml")
    again = windlass("plan", "--plan", "plan.toml")
    assert first.returncode == again.returncode == 0, again.stderr
    speeds = [
        next(line for line in done.stdout.splitlines() if line.startswith("speed-up"))
        for done in (first, again)
    ]
    assert speeds[0] == speeds[1]
