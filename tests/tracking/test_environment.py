"""The environment records the code, packages and processor of a run."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from windlass.schema import CodeSnapshot, CodeTree, Environment
from windlass.tracking.environment import collect_environment
from windlass.tracking.redaction import REPLACEMENT


def test_the_environment_is_a_document_with_every_package(tmp_path: Path):
    code = CodeSnapshot(windlass=CodeTree(commit="3f9c", diff_sha256="1a"))
    environment = collect_environment(["windlass", "train", "gpt tiny"], code)
    environment.save(tmp_path / "environment.json")
    assert Environment.load(tmp_path / "environment.json") == environment
    assert environment.packages["pydantic"] == metadata.version("pydantic")
    assert environment.command == ("windlass", "train", "gpt tiny")
    assert (environment.commit, environment.dirty) == ("3f9c", True)
    assert environment.threads >= 1
    assert environment.processor


def test_only_variables_that_change_a_run_are_kept_and_no_secret_is(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in {
        "OMP_NUM_THREADS": "7",
        "TORCH_HOME": "https://me:hunter22@host/x",
        "NCCL_AUTH_TOKEN": "abc",
        "CUDA_SIGN": "sk-abcdefghijklmnopqrstuv",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "WANDB_API_KEY": "0123456789",
    }.items():
        monkeypatch.setenv(name, value)
    variables = collect_environment([]).variables
    assert variables["OMP_NUM_THREADS"] == "7"
    assert variables["TORCH_HOME"] == "https://[looks like a secret]@host/x"
    assert {variables[name] for name in ("NCCL_AUTH_TOKEN", "CUDA_SIGN")} == {REPLACEMENT}
    assert not {"AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HOME", "PATH"} & variables.keys()


def test_where_and_by_which_command_a_run_started_is_no_part_of_its_fingerprint():
    one = collect_environment(["windlass", "train", "--folder", "a"])
    other = one.model_copy(update={"command": ("windlass",), "host": "elsewhere", "commit": "1"})
    assert other.fingerprint() == one.fingerprint()
    assert one.model_copy(update={"python": "3.9.1"}).fingerprint() != one.fingerprint()


def test_records_are_read_without_torch():
    code = "import sys, windlass.tracking, windlass.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
