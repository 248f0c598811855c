"""The code of two runs is checked out beside each other, and their repository stays as it was."""

from pathlib import Path

import pytest

from git_commands import git
from windlass.judging.differences.code_versions import code_versions
from windlass.schema import CODE_FILE, CodeSnapshot, CodeTree, UntrackedFile


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a checkout with two commits of one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git(folder, "init", "--quiet")
    for width in (64, 128):
        (folder / "model.py").write_text(f"width = {width}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", f"width {width}")
    return folder


def run_of(folder: Path, tree: CodeTree) -> Path:
    folder.mkdir()
    windlass = CodeTree(digest="0" * 64)
    (folder / CODE_FILE).write_text(CodeSnapshot(windlass=windlass, project=tree).to_json())
    return folder


def test_both_versions_are_checked_out_and_the_repository_stays_as_it_was(
    checkout: Path, tmp_path: Path
):
    first, second = git(checkout, "rev-list", "--reverse", "HEAD").split()
    (checkout / "model.py").write_text("width = 256\n")
    diff = git(checkout, "diff", "HEAD") + "\n"
    extra = UntrackedFile(name="extra.py", sha256="0" * 64, text="depth = 3\n")
    before = sorted(path for path in (checkout / ".git").rglob("*"))

    found, reasons = code_versions(
        run_of(tmp_path / "good", CodeTree(commit=first)),
        run_of(tmp_path / "bad", CodeTree(commit=second, diff=diff, untracked=(extra,))),
    )

    assert not reasons
    assert found is not None
    good, bad = found
    assert (good.folder / "model.py").read_text() == "width = 64\n"
    assert (bad.folder / "model.py").read_text() == "width = 256\n"
    assert (bad.folder / "extra.py").read_text() == "depth = 3\n"
    assert (good.is_clean, bad.is_clean) == (True, False)
    assert sorted(path for path in (checkout / ".git").rglob("*")) == before
    assert len(git(checkout, "worktree", "list").splitlines()) == 1


def test_a_commit_that_is_not_in_the_repository_is_a_reason(checkout: Path, tmp_path: Path):
    commit = git(checkout, "rev-parse", "HEAD")
    found, reasons = code_versions(
        run_of(tmp_path / "good", CodeTree(commit=commit)),
        run_of(tmp_path / "bad", CodeTree(commit="1" * 40)),
    )
    assert found is None
    assert "the code cannot be switched" in reasons[0]
    assert not [*(tmp_path / "cache" / "windlass" / "code").glob("1111*")]


def test_nothing_that_a_record_names_becomes_a_part_of_git(checkout: Path, tmp_path: Path):
    commit = git(checkout, "rev-parse", "HEAD")
    hook = UntrackedFile(name=".git/hooks/post-checkout", sha256="0" * 64, text="#!/bin/sh\n")
    setting = UntrackedFile(name="a/../.GIT/config", sha256="0" * 64, text="[core]\n")
    found, _ = code_versions(
        run_of(tmp_path / "good", CodeTree(commit=commit)),
        run_of(tmp_path / "bad", CodeTree(commit=commit, untracked=(hook, setting))),
    )
    assert found is not None
    folder = found[1].folder
    assert not (folder / ".git" / "hooks" / "post-checkout").exists()
    assert not (folder / ".GIT").exists()
    option = CodeTree(commit="--upload-pack=touch")
    found, reasons = code_versions(
        run_of(tmp_path / "one", option), run_of(tmp_path / "two", CodeTree(commit=commit))
    )
    assert found is None
    assert "the recorded commit is none" in reasons[0]
