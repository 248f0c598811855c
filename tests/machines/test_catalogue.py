import tomllib
from pathlib import Path

import pytest

import windlass.machines
from windlass.errors import MachineError
from windlass.machines import catalogue

FOLDER = Path(windlass.machines.__file__).parent


@pytest.mark.parametrize("name", catalogue.names())
def test_each_machine_loads_under_its_own_name_with_source_and_date(name: str):
    machine = catalogue.find(name)
    assert machine.name == name
    assert machine.source
    assert machine.date
    assert machine.device.near.capacity_bytes > 0


@pytest.mark.parametrize("name", catalogue.names())
def test_each_number_of_a_machine_stands_below_a_comment_that_says_whence(name: str):
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    stated = ("peak =", "capacity_bytes =", "launch_seconds =", "update_rate =", "points =")
    for number, line in enumerate(lines):
        if line.startswith(stated):
            assert lines[number - 1].startswith("#"), f"{name}.toml:{number + 1}"


@pytest.mark.parametrize("name", catalogue.names())
def test_no_curve_passes_its_peak(name: str):
    for rate in catalogue.find(name).device.matmul:
        points = (*rate.curve.points, *rate.attention.points)
        assert max(point.rate for point in points) <= rate.peak
        assert sorted(point.size for point in rate.curve.points) == [
            point.size for point in rate.curve.points
        ]


def test_an_unknown_machine_is_refused_with_the_nearest_name():
    with pytest.raises(MachineError, match="did you mean `a100-80gb`"):
        catalogue.find("a100-80g")


def test_a_machine_file_says_nothing_twice():
    for name in catalogue.names():
        tree = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        assert len({rate["precision"] for rate in tree["device"]["matmul"]}) == 2


def test_a_file_of_ones_own_is_a_machine_too(tmp_path: Path):
    machine = catalogue.find("h100").model_copy(update={"name": "ours", "hosts": 2})
    machine.save(tmp_path / "ours.toml")
    assert catalogue.find(str(tmp_path / "ours.toml")) == machine
