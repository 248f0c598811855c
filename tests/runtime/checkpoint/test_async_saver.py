"""Checkpoints that are saved while training goes on."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windlass.errors import CheckpointError, StorageError
from windlass.models.layer_stack import LayerStack
from windlass.runtime import param_store
from windlass.runtime.checkpoint.async_saver import AsyncSaver
from windlass.runtime.checkpoint.checkpoint import (
    CheckpointHold,
    Manifest,
    checkpoint_folders,
    hold_checkpoint,
    latest_checkpoint,
    remove_temporaries,
    verify_checkpoint,
)
from windlass.runtime.checkpoint.layer_tensors import read_tensors
from windlass.runtime.checkpoint.safetensors_io import (
    FileChecksum,
    SavedFile,
    write_tensors,
)
from windlass.runtime.parameters import LayerParameters, checkpoint_tensors, resident_layers
from windlass.torch_ext import device_for


def save_layer(layer: LayerParameters, to: Path) -> tuple[SavedFile, ...]:
    weights = [(weight.name, weight.working) for weight in layer.frozen]
    tensors = checkpoint_tensors((), layer.persistent_buffers, frozen=weights)
    return param_store.write_checkpoint_file(tensors, to, None)


def make_saver(folder: Path, layers: tuple[LayerParameters, ...]) -> AsyncSaver:
    def save(index: int, to: Path) -> tuple[SavedFile, ...]:
        return save_layer(layers[index], to)

    return AsyncSaver(folder, len(layers), keep=2, save_layer=save, device=device_for("cpu"))


def manifest(step: int):
    return Manifest(step=step, samples=4 * step, seed=0, plan="p", graph="g", files={})


@pytest.fixture
def layers(gpt: Callable[..., LayerStack]):
    return resident_layers(gpt(), seed=0, precision="float32", device=torch.device("cpu"))


@pytest.fixture
def saver(layers: tuple[LayerParameters, ...], folder: Path):
    saver = make_saver(folder, layers)
    yield saver
    saver.close()


def save(saver: AsyncSaver, *steps: int) -> None:
    for step in steps:
        saver.begin(manifest(step))
        saver.finish()


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path):
    named = {
        "wide": torch.randn(5, 7),
        "half": torch.randn(3).bfloat16(),
        "one": torch.tensor(4.0),
        "none": torch.zeros(0, 3),
        "turned": torch.randn(4, 6).t(),
        "whole": torch.arange(9),
    }
    write_tensors(tmp_path / "x.safetensors", named.items())
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == named.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in named.items())


def test_tensors_are_read_into_existing_memory(tmp_path: Path):
    write_tensors(tmp_path / "x", {"a": torch.ones(3), "b": torch.zeros(2)}.items())
    place = torch.zeros(3)
    read_tensors(tmp_path / "x", {"a": place})
    assert torch.equal(place, torch.ones(3))


def test_only_the_newest_checkpoints_are_kept(saver: AsyncSaver, folder: Path):
    save(saver, 1, 2, 3, 10)
    assert [path.name for path in checkpoint_folders(folder)] == ["step-00000003", "step-00000010"]
    assert latest_checkpoint(folder).manifest.step == 10
    assert saver.newest_step == 10


def test_a_checkpoint_that_somebody_reads_is_removed_when_he_is_done(
    saver: AsyncSaver, folder: Path
):
    save(saver, 1)
    read = latest_checkpoint(folder, holds=True)
    also_read = hold_checkpoint(folder, 1)
    save(saver, 2, 3)
    read.hold.release()
    save(saver, 4)
    assert [path.name[-1] for path in checkpoint_folders(folder)] == ["1", "3", "4"]
    verify_checkpoint(also_read.path)
    del also_read
    save(saver, 5)
    assert [path.name[-1] for path in checkpoint_folders(folder)] == ["4", "5"]


def test_a_checkpoint_that_is_gone_cannot_be_held(saver: AsyncSaver, folder: Path):
    save(saver, 1, 2, 3)
    assert hold_checkpoint(folder, 1) is None
    with pytest.raises(FileNotFoundError):
        CheckpointHold(folder / "step-00000001")


def test_whoever_reads_the_newest_checkpoint_of_a_run_that_goes_on_always_gets_a_whole_one(
    saver: AsyncSaver, folder: Path
):
    save(saver, 1)
    done = threading.Event()

    def go_on() -> None:
        for step in range(2, 60):
            save(saver, step)
        done.set()

    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(go_on)
        steps = []
        while not done.is_set():
            checkpoint = latest_checkpoint(folder, holds=True)
            time.sleep(0.005)
            for name in checkpoint.manifest.files:
                assert load_file(checkpoint.path / name)
            assert checkpoint.damaged == ()
            steps.append(checkpoint.manifest.step)
        run.result()
    assert steps == sorted(steps)


def test_a_folder_without_checkpoints_has_no_latest_one(folder: Path):
    assert latest_checkpoint(folder) is None


@pytest.mark.parametrize("name", ["manifest.json", "layer-0002.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_any_damage_is_found_and_named(harm: str, name: str, saver: AsyncSaver, folder: Path):
    save(saver, 1, 2)
    file = folder / "step-00000002" / name
    content = file.read_bytes()
    if harm == "remove":
        file.unlink()
    elif harm == "flip":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(content[: -7 if harm == "cut" else 0])
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(file.parent)
    checkpoint = latest_checkpoint(folder)
    assert checkpoint.manifest.step == 1
    assert name in checkpoint.damaged[0]


def test_a_checkpoint_of_an_older_format_is_refused_with_one_sentence(
    saver: AsyncSaver, folder: Path
):
    save(saver, 1, 2)
    for path in checkpoint_folders(folder):
        file = path / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    expected = r"step-00000002/manifest.json` has checkpoint format 1 .* reads format 2"
    with pytest.raises(CheckpointError, match=expected) as error:
        latest_checkpoint(folder)
    assert "step-00000001" not in str(error.value)


def test_if_every_checkpoint_is_damaged_all_are_named(saver: AsyncSaver, folder: Path):
    save(saver, 1, 2)
    for path in checkpoint_folders(folder):
        (path / "layer-0000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002.*step-00000001"):
        latest_checkpoint(folder)


def test_a_layer_may_not_change_before_it_is_saved(
    layers: tuple[LayerParameters, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    saver = make_saver(folder, layers)
    reached = []

    def slow(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *_: None) -> FileChecksum:
        if path.name == "layer-0001.safetensors":
            # The update of the first layer may start; that of this one must wait.
            saver.wait_for(0)
            assert not saver._saved[1].is_set()
        reached.append(path.name)
        return write_tensors(path, tensors)

    monkeypatch.setattr(param_store, "write_tensors", slow)
    saver.begin(manifest(1))
    saver.wait_for(1)
    assert reached[:2] == ["layer-0000.safetensors", "layer-0001.safetensors"]
    saver.finish()
    saver.close()


def test_a_full_disk_fails_the_save_and_keeps_the_previous_checkpoint(
    saver: AsyncSaver, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    save(saver, 1)

    def full(path: Path, *_: object) -> FileChecksum:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(param_store, "write_tensors", full)
    saver.begin(manifest(2))
    saver.wait_for(3)
    with pytest.raises(StorageError, match=r"no space left.*step-00000002"):
        saver.finish()
    assert latest_checkpoint(folder).manifest.step == 1
    assert saver.newest_step == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_a_folder_that_is_deleted_during_a_save_ends_it_without_an_error_and_stays_so(
    layers: tuple[LayerParameters, ...], folder: Path
):
    def delete(index: int, to: Path) -> tuple[SavedFile, ...]:
        if index == 1:
            shutil.rmtree(folder)
        return save_layer(layers[index], to)

    saver = AsyncSaver(folder, len(layers), keep=2, save_layer=delete, device=device_for("cpu"))
    save(saver, 1)
    saver.close()

    assert saver.newest_step is None
    assert not folder.exists()


def test_an_unfinished_checkpoint_is_ignored_and_removed(saver: AsyncSaver, folder: Path):
    save(saver, 1)
    (folder / ".step-00000002.tmp").mkdir()
    (folder / ".step-00000002.tmp" / "layer-0000.safetensors").write_bytes(b"half")
    assert latest_checkpoint(folder).manifest.step == 1
    remove_temporaries(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
