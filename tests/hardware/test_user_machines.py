"""Machines that a user adds from reports of `windlass doctor`."""

from pathlib import Path

import pytest

from factories import tiny_machine
from windlass.errors import InputErrors, MachineError, RequestError, WindlassError
from windlass.hardware.user_machines import (
    load_user_machine,
    machine_of_report,
    save_user_machine,
    user_machine_names,
)
from windlass.schema import DoctorReport, Machine


def report(folder: Path, *, machine: Machine | None = None, **fields: object) -> Path:
    """A report of a machine in a file."""
    given = {"name": "lab", "date": "2026-01-01", "seconds": 60.0, "checks": ()} | fields
    document = DoctorReport.model_validate(given | {"machine": machine or measured()})
    path = folder / "report.toml"
    document.save(path)
    return path


def measured(name: str = "lab") -> Machine:
    return tiny_machine(host="2 GiB").model_copy(update={"name": name})


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_machine_comes_back_from_a_report_as_it_was_measured(tmp_path: Path, suffix: str):
    path = report(tmp_path)
    other = path.with_suffix(suffix)
    DoctorReport.load(path).save(other)
    save_user_machine(tmp_path / "kept", machine_of_report(other))
    assert user_machine_names(tmp_path / "kept") == ("lab",)
    assert load_user_machine(tmp_path / "kept", "lab") == measured()
    assert load_user_machine(tmp_path / "kept", "other") is None


def test_a_machine_replaces_another_one_only_if_that_is_asked_for(tmp_path: Path):
    first, faster = measured(), measured().model_copy(update={"devices_per_host": 1, "hosts": 1})
    faster = faster.model_copy(update={"date": "2026-02-02"})
    save_user_machine(tmp_path, first)
    save_user_machine(tmp_path, first)  # the same again changes nothing
    with pytest.raises(MachineError, match=r"another machine named `lab`.*--replace"):
        save_user_machine(tmp_path, faster)
    assert load_user_machine(tmp_path, "lab") == first
    save_user_machine(tmp_path, faster, replace=True)
    assert load_user_machine(tmp_path, "lab") == faster


def test_a_report_whose_name_is_taken_is_added_under_another_one(tmp_path: Path):
    path = report(tmp_path, name="h100")
    with pytest.raises(MachineError, match=r"`h100` names another machine.*--name"):
        machine_of_report(path)
    assert machine_of_report(path, "my-h100").name == "my-h100"
    with pytest.raises(InputErrors, match="no name of a machine"):
        machine_of_report(path, "../h100")


def test_a_report_without_rates_says_where_the_reason_is(tmp_path: Path):
    path = report(tmp_path)
    bare = DoctorReport.load(path).model_copy(update={"machine": None})
    bare.save(path)
    with pytest.raises(MachineError, match=r"no measured rates.*group `machine`"):
        machine_of_report(path)


def test_a_machine_file_is_no_report_and_the_message_says_what_takes_it(tmp_path: Path):
    path = tmp_path / "machine.toml"
    measured().save(path)
    with pytest.raises(RequestError, match=r"describes a machine.*--on "):
        machine_of_report(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2", "`version`"),
        ("checks = 3", "`checks`"),
        ("not toml", "Expected '='"),
        ("a" * 10 + " = [" * 4000, "nested|Invalid|deep"),
        ("[machine]\nname = 3", "`machine.name`|machine"),
    ],
    ids=["version", "checks", "text", "depth", "machine"],
)
def test_a_damaged_report_is_one_clear_error(tmp_path: Path, text: str, message: str):
    path = tmp_path / "report.toml"
    path.write_text(text)
    with pytest.raises(WindlassError, match=message):
        machine_of_report(path)


def test_rates_that_no_machine_has_are_refused(tmp_path: Path):
    machine = measured()
    device = machine.device.model_copy(update={"update_rate": 0.0})
    path = report(tmp_path, machine=machine.model_copy(update={"device": device}))
    with pytest.raises(InputErrors, match=r"`device.update_rate` = 0"):
        machine_of_report(path)
