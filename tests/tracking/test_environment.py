"""The environment records the code, packages and processor of a run."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from windlass.schema.run_record import Environment
from windlass.tracking.environment import code_version, collect_environment


def git(folder: Path, *words: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *name, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_code_and_changes_make_it_dirty(tmp_path: Path):
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    git(tmp_path, "init", "--quiet")
    assert code_version(file) == (None, False)
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    assert code_version(file) == (git(tmp_path, "rev-parse", "HEAD"), False)
    file.write_text("x = 2\n")
    assert code_version(file) == (git(tmp_path, "rev-parse", "HEAD"), True)


def test_an_installed_package_below_a_checkout_has_no_commit(tmp_path: Path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "code.py").write_text("x = 1\n")
    assert code_version(tmp_path / "lib" / "code.py") == (None, False)


def test_the_environment_is_a_document_with_every_package(tmp_path: Path):
    environment = collect_environment(["windlass", "train", "gpt tiny"])
    environment.save(tmp_path / "environment.json")
    assert Environment.load(tmp_path / "environment.json") == environment
    assert environment.packages["pydantic"] == metadata.version("pydantic")
    assert environment.command == ("windlass", "train", "gpt tiny")
    assert environment.threads >= 1
    assert environment.processor


def test_records_are_read_without_torch():
    code = "import sys, windlass.tracking, windlass.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
