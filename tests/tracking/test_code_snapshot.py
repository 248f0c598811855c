"""The code of a run is kept as git sees it, without secrets, within limits, and never fails it."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import windlass
from git_commands import git
from windlass.schema import CodeSnapshot, CodeTree
from windlass.tracking.code_snapshot import snapshot_code
from windlass.tracking.redaction import REPLACEMENT, is_secret_name, without_secrets

KEY = "sk-" + "abcdefghijklmnopqrstuvwxyz"


GIT = shutil.which("git")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "model.py").write_text("width = 64\n")
    (tmp_path / "keys.pem").write_text("first\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def tree_of(folder: Path, **limits: float) -> CodeTree:
    tree = snapshot_code(folder=folder, **({"seconds": 30.0} | limits)).project  # type: ignore[arg-type]
    assert tree is not None
    return tree


def test_a_clean_checkout_is_its_commit(checkout: Path):
    assert tree_of(checkout) == CodeTree(commit=git(checkout, "rev-parse", "HEAD"))


def test_changes_and_untracked_text_are_kept_and_make_another_fingerprint(checkout: Path):
    clean = tree_of(checkout)
    (checkout / "model.py").write_text("width = 128\n")
    changed = tree_of(checkout)
    assert "-width = 64\n+width = 128\n" in changed.diff
    (checkout / "new module.py").write_text("depth = 3\n")
    (checkout / "weights.bin").write_bytes(b"\0\1")
    tree = tree_of(checkout)
    assert [(file.name, file.text) for file in tree.untracked] == [("new module.py", "depth = 3\n")]
    assert [(file.name, file.reason) for file in tree.omitted] == [("weights.bin", "is no text")]
    assert len({t.fingerprint() for t in (clean, changed, tree)}) == 3


def test_secrets_are_named_and_neither_read_nor_kept(checkout: Path):
    (checkout / "keys.pem").write_text("second\n")
    (checkout / ".env").write_text("A=third\n")
    (checkout / "model.py").write_text(f'width = 64\nclient("{KEY}")\n')
    (checkout / "run.sh").write_text("export API_KEY='0a1b2c3d4e5f'\n")
    (checkout / "credentials.json").write_text("fourth")
    tree = tree_of(checkout)
    assert {file.name for file in tree.omitted} == {"keys.pem", ".env", "credentials.json"}
    assert {file.reason for file in tree.omitted} == {"looks like a secret"}
    kept = tree.to_json()
    assert "model.py" in tree.diff
    assert not any(text in kept for text in (KEY, "second", "third", "fourth", "0a1b2c3d4e5f"))


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        (".env", True), ("a/.env.local", True), ("b/prod.env", True), ("id_rsa", True),
        ("x/ID_ED25519.pub", True), ("server.key", True), ("my_secrets.yaml", True),
        ("gcp-credentials.json", True), ("hf_token.txt", True), ("token", True),
        (".ssh/config", True), ("home/.aws/x", True), (".netrc", True), ("passwords.txt", True),
        ("tokenizer.json", False), ("token_files.py", False), ("environment.py", False),
        ("keys.py", False), ("monkey.txt", False), ("tokens.bin/part", False),
    ],
)  # fmt: skip
def test_a_secret_is_told_by_its_name(name: str, *, is_secret: bool):
    assert is_secret_name(name) is is_secret


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f'k = "{KEY}"', 'k = "?"'), ("di" + KEY, "di" + KEY),
        ("API_KEY='0a1b2c3d'", "API_KEY='?'"), ('{"hf_token": "abcdefgh"}', '{"hf_token": "?"}'),
        ("postgres://u:pw@host/db", "postgres://?@host/db"), ("key = AKIA" + "Q" * 16, "key = ?"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nxyz\n", "a\n?"),
        ('tokenizer = "gpt2-large"', 'tokenizer = "gpt2-large"'), ("x = token[0]", "x = token[0]"),
    ],
)  # fmt: skip
def test_a_value_that_looks_like_a_key_is_replaced(text: str, kept: str):
    assert without_secrets(text) == kept.replace("?", REPLACEMENT)


def test_what_is_too_much_is_cut_and_said(checkout: Path):
    (checkout / "model.py").write_text("x = 1\n" * 400)
    (checkout / "large.csv").write_text("1,2\n" * 400)
    (checkout / "small.py").write_text("y = 2\n")
    tree = tree_of(checkout, kept_bytes=1000)
    assert len(tree.diff) < 1100
    assert "more bytes are not kept]" in tree.diff
    assert [file.name for file in tree.untracked] == ["small.py"]
    assert [(file.name, file.reason) for file in tree.omitted] == [("large.csv", "is too large")]
    before = tree.fingerprint()
    (checkout / "model.py").write_text("x = 1\n" * 399 + "x = 2\n")
    assert tree_of(checkout, kept_bytes=1000).fingerprint() != before


def test_what_runs_write_into_a_checkout_is_no_code(checkout: Path):
    clean = tree_of(checkout)
    for name in ("runs/a/journal/0.1.j", "runs/a/plan.toml", "runs/.catalog.sqlite", "out.log"):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert tree_of(checkout) == clean


def test_odd_names_are_kept(checkout: Path):
    for name in (b"a\nb.py", b"\xff.py", b'"q".py', "é ü.py".encode()):
        Path(os.fsdecode(os.fsencode(checkout) + b"/" + name)).write_text("x")
    names = {file.name for file in tree_of(checkout).untracked}
    assert names == {"a\nb.py", "\\udcff.py", '"q".py', "é ü.py"}
    snapshot = snapshot_code(folder=checkout, seconds=30)
    assert CodeSnapshot.model_validate_json(snapshot.to_json()) == snapshot


def test_a_checkout_without_a_commit_is_all_untracked(tmp_path: Path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.py").write_text("b")
    git(tmp_path, "add", "a.py")
    tree = tree_of(tmp_path)
    assert (tree.commit, [file.name for file in tree.untracked]) == (None, ["a.py", "b.py"])


def test_git_that_takes_too_long_is_a_note_and_costs_no_more_than_its_time(checkout: Path):
    (checkout / "model.py").write_text("width = 1\n")
    slow = checkout / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text('#!/bin/sh\ncase "$*" in *status*) sleep 20;; esac\nexec /usr/bin/git "$@"\n')
    slow.chmod(0o755)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
        tree = tree_of(checkout, seconds=1.0)
    assert time.monotonic() - start < 10
    assert tree.commit == git(checkout, "rev-parse", "HEAD")
    assert tree.notes == ("changes are not recorded: git took longer than 1 s",)


def test_without_git_a_model_file_is_kept_and_windlass_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "model.py"
    file.write_text("build = 1\n")
    monkeypatch.setenv("PATH", "")
    snapshot = snapshot_code(file)
    assert snapshot.windlass.digest is not None
    assert snapshot.project is not None
    assert [(file.name, file.text) for file in snapshot.project.untracked] == [
        ("model.py", "build = 1\n")
    ]
    assert snapshot_code(folder=tmp_path).project is None


def test_the_code_of_windlass_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch):
    package = Path(windlass.__file__).parent
    monkeypatch.chdir(package)
    snapshot = snapshot_code(seconds=30)
    assert snapshot.project is None
    try:
        expected = git(package, "rev-parse", "HEAD")
    except subprocess.CalledProcessError:
        assert snapshot.windlass.digest is not None
    else:
        assert snapshot.windlass.commit == expected
