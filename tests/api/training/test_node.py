"""One command on a machine of two devices, which are CPUs here: only their kind is another."""

from pathlib import Path

import pytest

from factories import tiny_machine
from windlass import api
from windlass.hardware.local_machine import save_local_machine, system_fingerprint

MODEL = ("gpt-tiny", "model.layers=2", "model.width=32", "model.heads=2", "train.batch=32")
STEPS = (
    "train.sequence=64", "train.steps=2", "compile=false", "data.source=text",
    "data.vocabulary=300",
)  # fmt: skip


@pytest.fixture
def node(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, which is the current one; this machine has two devices."""
    machine = tiny_machine(memory="8 GiB", devices=2).model_copy(
        update={"name": "here", "system": system_fingerprint()}
    )
    save_local_machine(tmp_path / "cache" / "windlass", machine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(home)
    return home


@pytest.mark.usefixtures("node")
def test_a_plan_that_nobody_pins_uses_all_devices_of_this_machine():
    planned = api.plan(*MODEL, *STEPS)
    assert planned.machine.devices == 2
    assert planned.plan.parallel.devices == 2


@pytest.mark.usefixtures("node")
def test_a_pinned_plan_uses_as_many_devices_as_it_says():
    one = api.plan(*MODEL, *STEPS, "parallel.data=1", "parallel.pipeline=1", "parallel.tensor=1")
    two = api.plan(*MODEL, *STEPS, "parallel.data=2")
    assert one.plan.parallel.devices == 1
    assert two.plan.parallel.devices == two.machine.devices == 2
    # They are devices of their own, not shares of one.
    assert two.machine.device == one.machine.device


@pytest.mark.slow  # 8 s: make test-slow
@pytest.mark.usefixtures("node")
def test_training_without_any_option_starts_a_rank_on_each_device():
    run = api.train(api.plan(*MODEL, *STEPS))
    assert len(list(run)) == 2
    assert sorted(path.name for path in (run.folder / "ranks").glob("*.beat")) == [
        "0.beat", "1.beat",
    ]  # fmt: skip
