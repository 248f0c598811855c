import subprocess
import sys
from pathlib import Path

import pytest

from factories import tiny_machine
from windlass.hardware.local_machine import (
    LOCAL_MACHINE_FILE,
    is_local_machine_changed,
    load_local_machine,
    save_local_machine,
    system_fingerprint,
)
from windlass.schema.machine import Machine


@pytest.fixture
def measured() -> Machine:
    return tiny_machine().model_copy(update={"name": "here", "system": system_fingerprint()})


def test_a_measurement_comes_back_as_it_was_kept(tmp_path: Path, measured: Machine):
    save_local_machine(tmp_path, measured)
    assert load_local_machine(tmp_path) == measured


def test_nothing_kept_is_no_measurement(tmp_path: Path):
    assert load_local_machine(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"name = ", b"\xff\xfe", b'name = "here"\nspeed = 1\n'])
def test_a_damaged_measurement_is_no_measurement(tmp_path: Path, content: bytes):
    (tmp_path / LOCAL_MACHINE_FILE).write_bytes(content)
    assert load_local_machine(tmp_path) is None


def test_a_measurement_of_another_system_is_no_measurement(tmp_path: Path, measured: Machine):
    save_local_machine(tmp_path, measured.model_copy(update={"system": "0123456789ab"}))
    assert load_local_machine(tmp_path) is None


def test_a_half_written_measurement_is_never_seen(tmp_path: Path, measured: Machine):
    whole = save_local_machine(tmp_path, measured).read_bytes()
    (tmp_path / LOCAL_MACHINE_FILE).write_bytes(whole[: len(whole) // 2])
    assert load_local_machine(tmp_path) is None


def test_a_changed_digit_is_noticed_unless_the_seal_is_removed_on_purpose(
    tmp_path: Path, measured: Machine
):
    path = save_local_machine(tmp_path, measured)
    edited = path.read_text().replace('name = "here"', 'name = "Here"')
    assert not is_local_machine_changed(tmp_path)

    path.write_text(edited)
    assert load_local_machine(tmp_path) is None
    assert is_local_machine_changed(tmp_path)

    path.write_text(edited.partition("\n")[2])
    assert load_local_machine(tmp_path) == measured.model_copy(update={"name": "Here"})


def test_the_fingerprint_of_a_system_stays_the_same_in_another_process():
    module = "windlass.hardware.local_machine"
    code = f"from {module} import system_fingerprint as own; print(own())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == system_fingerprint()


def test_finding_a_machine_imports_no_torch():
    code = (
        "import sys; from windlass.hardware import catalog, local_machine; "
        "catalog.load_machine('h100'); local_machine.system_fingerprint(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
