"""`windlass machines`: what can be named, and where each number comes from."""

import json

import pytest

from command_line import Windlass


def test_a_list_names_families_their_sizes_and_single_devices(windlass: Windlass) -> None:
    told = windlass("machines").stdout
    for name in ("here", "dgx-h100:N", "gb200-nvl72", "ipu-pod256", "rtx-4090-pc:N", "a100-80gb"):
        assert any(line.split()[:1] == [name] for line in told.splitlines()), name


def test_a_number_of_hosts_is_written_behind_a_colon(windlass: Windlass) -> None:
    done = windlass("machines", "show", "dgx-a100-80gb:8", "--json")
    told = json.loads(done.stdout)
    assert told["machine"]["hosts"] * told["machine"]["devices_per_host"] == 64
    assert {number["path"] for number in told["numbers"]} >= {"hosts", "links.infiniband.rate"}
    assert all(number["source"]["source"] for number in told["numbers"])


def test_the_list_as_json_has_a_value_for_each_machine(windlass: Windlass) -> None:
    told = {line["name"]: line for line in json.loads(windlass("machines", "--json").stdout)}
    assert told["ipu-pod64"]["devices"] == 64
    assert told["ipu-pod64"]["execution_model"] == "bulk-synchronous"
    assert told["dgx-h100:N"]["devices"] == 8 * 16384


@pytest.mark.parametrize(
    ("name", "told"),
    [("dgx-h100:16385", "1 to 16384"), ("h100:2", "`dgx-h100:N`"), ("ipu-pod", "did you mean")],
)
def test_a_machine_that_is_not_there_is_one_clear_message(
    windlass: Windlass, name: str, told: str
) -> None:
    done = windlass("machines", "show", name)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_new_machine_is_a_file_that_plans_take(windlass: Windlass) -> None:
    done = windlass("machines", "new", "lab", "device=rtx-4090", "devices=2", "link=20GB/s?")
    assert done.returncode == 0
    assert "wrote lab.toml, with " in done.stdout
    told = json.loads(windlass("machines", "show", "lab.toml", "--json").stdout)
    assert told["machine"]["devices_per_host"] == 2
    how = {number["path"]: number["source"]["how"] for number in told["numbers"]}
    assert how["links.pcie.rate"] == "guess"
    assert how["devices_per_host"] == "published"


def test_a_new_machine_replaces_no_file_and_names_all_faults(windlass: Windlass) -> None:
    assert windlass("machines", "new", "lab", "device=h100").returncode == 0
    again = windlass("machines", "new", "lab", "device=h100")
    assert again.returncode == 2
    assert "`lab.toml` exists already" in again.stderr
    wrong = windlass("machines", "new", "other", "device=h10", "hosts=x")
    assert wrong.returncode == 2
    assert "did you mean `h100`" in wrong.stderr
    assert "'x' is not a number" in wrong.stderr
    assert windlass("machines", "show", "other.toml").returncode == 2
