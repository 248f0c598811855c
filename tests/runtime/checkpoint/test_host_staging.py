"""Saves of an accelerator's state, beside the passes that follow."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from simulated_device import SCHEDULES, Schedule, SimulatedDevice
from windlass.runtime.checkpoint.async_saver import AsyncSaver
from windlass.runtime.checkpoint.checkpoint import Manifest, latest_checkpoint
from windlass.runtime.checkpoint.safetensors_io import HostStaging, SavedFile
from windlass.runtime.param_store import write_checkpoint_file

BLOCK_BYTES = 4096
WEIGHTS: Mapping[str, Tensor] = {
    "long": torch.arange(5000.0),  # five blocks
    "exact": torch.arange(1024.0),  # one
    "bytes": torch.arange(7, dtype=torch.uint8),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0),
}


def saved_beside_the_next_step(device: SimulatedDevice, folder: Path) -> Mapping[str, Tensor]:
    """What a checkpoint holds whose layer is overwritten as soon as it may be."""
    staging = HostStaging(device, BLOCK_BYTES)
    weights = {name: device.to_device(weight).clone() for name, weight in WEIGHTS.items()}

    def save(_: int, to: Path) -> tuple[SavedFile, ...]:
        return write_checkpoint_file(weights.items(), to, staging)

    saver = AsyncSaver(folder, 1, keep=1, save_layer=save, device=device)
    for weight in weights.values():
        weight.add_(weight)
    saver.begin(Manifest(step=1, samples=1, seed=0, plan="p", graph="g", files={}))
    saver.wait_for(0)
    for weight in weights.values():
        weight.zero_()
    device.synchronize()
    saver.close()
    staging.close()
    return load_file(latest_checkpoint(folder).path / "layer-0000.safetensors")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_save_beside_the_next_step_holds_the_step_that_it_follows(
    schedule: Schedule, tmp_path: Path
):
    with SimulatedDevice(schedule) as device:
        saved = saved_beside_the_next_step(device, tmp_path)
        assert not device.simulation.faults
    assert saved.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        assert torch.equal(saved[name], weight + weight), name


def test_a_save_that_leaves_out_a_wait_is_caught(tmp_path: Path):
    """Each place where the saver waits, left out, is noticed under some schedule."""
    with SimulatedDevice(SCHEDULES[0]) as device:
        saved_beside_the_next_step(device, tmp_path / "whole")
        by_place = {site: site[1].partition("+")[0] for site in device.simulation.sites}
    assert set(by_place.values()) == {
        "AsyncSaver._write_layers", "_content", "HostStaging.blocks",
    }  # fmt: skip
    # The last one matters where a write fails, as in `test_simulated_device.py`.
    sites = [site for site, place in by_place.items() if place != "HostStaging.blocks"]
    for number, site in enumerate(sites):
        assert any(
            is_noticed(schedule, site, tmp_path / f"{number}-{schedule.name}")
            for schedule in SCHEDULES
        ), site


def is_noticed(schedule: Schedule, site: tuple[str, ...], folder: Path) -> bool:
    """Whether a save without one wait writes other values, or the simulation reports a fault."""
    with SimulatedDevice(schedule, drop=frozenset({site})) as device:
        saved = saved_beside_the_next_step(device, folder)
        faults = device.simulation.faults
    return bool(faults) or any(
        not torch.equal(saved[name], weight + weight) for name, weight in WEIGHTS.items()
    )
