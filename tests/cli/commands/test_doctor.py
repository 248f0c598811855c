"""`windlass doctor` and `windlass machines add`, as a user runs them."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from command_line import Windlass, start
from factories import tiny_machine
from windlass.schema import DoctorReport


def save_report(path: Path, name: str) -> None:
    machine = tiny_machine(host="2 GiB").model_copy(update={"name": name})
    DoctorReport(name=name, date="2026-01-01", seconds=1.0, checks=(), machine=machine).save(path)


def test_a_machine_of_a_report_is_listed_and_plans_name_it(windlass: Windlass, tmp_path: Path):
    save_report(tmp_path / "report.toml", "their-lab")
    done = windlass("machines", "add", "report.toml")
    assert done.returncode == 0, done.stderr
    assert "added `their-lab`" in done.stdout
    assert "their-lab" in windlass("machines").stdout
    planned = windlass("plan", "gpt-tiny", "--on", "their-lab")
    assert planned.returncode == 0, planned.stderr
    assert "on their-lab; every figure is predicted" in planned.stdout


def test_a_second_machine_of_a_name_is_refused_until_it_is_replaced(
    windlass: Windlass, tmp_path: Path
):
    save_report(tmp_path / "report.toml", "twice")
    assert windlass("machines", "add", "report.toml").returncode == 0
    path = tmp_path / "report.toml"
    path.write_text(path.read_text().replace("2026-01-01", "2026-02-02"))
    again = windlass("machines", "add", "report.toml")
    assert again.returncode == 2
    assert "--replace" in again.stderr
    assert windlass("machines", "add", "report.toml", "--replace").returncode == 0


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nowhere/report.toml", "there is no folder"),
        ("report.txt", "`.toml` or `.json`"),
        ("plan.toml", "is no report of `windlass doctor`"),
        (".", "is a directory|`.toml` or"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    refused: Windlass, tmp_path: Path, out: str, message: str
):
    (tmp_path / "plan.toml").write_text("model = 'gpt-tiny'\n")
    done = refused("doctor", "--out", out)
    assert done.returncode == 2
    assert any(each in done.stderr for each in message.split("|")), done.stderr
    assert (tmp_path / "plan.toml").read_text() == "model = 'gpt-tiny'\n"


@pytest.mark.slow
def test_the_report_of_this_machine_has_no_failure_and_another_user_plans_with_it(
    windlass: Windlass, surroundings: dict[str, str], tmp_path: Path
):
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = start(surroundings | folders, tmp_path, "doctor", "--json")
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stdout + stderr
    report = DoctorReport.load(tmp_path / "windlass-doctor.toml")
    assert json.loads(stdout)["name"] == report.name
    assert {check.group for check in report.checks} == {
        "kernels", "memory", "ranks", "machine", "plans", "steps",
    }  # fmt: skip
    text = (tmp_path / "windlass-doctor.toml").read_text()
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text
    assert windlass("machines", "add", "windlass-doctor.toml").returncode == 0
    assert windlass("plan", "gpt-tiny", "--on", report.name).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_doctor_that_is_stopped_leaves_no_process_and_no_file(
    surroundings: dict[str, str], tmp_path: Path, sent: signal.Signals, code: int
):
    process = start(surroundings, tmp_path, "doctor")
    family = psutil.Process(process.pid)
    while not family.children(recursive=True):
        time.sleep(0.05)
    time.sleep(3)
    left = family.children(recursive=True)
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode == code
    psutil.wait_procs(left, timeout=10)
    assert not any(child.is_running() for child in left)
    assert list(tmp_path.iterdir()) == []
