"""Inputs that nobody should give: each is refused in one sentence, before anything runs."""

import os
import resource
from pathlib import Path

import pytest

from windlass.cli.main import main

PLAN = ("plan", "gpt-tiny", "--on", "h100")
LONG, DIGITS, HUGE = "x" * 300, "9" * 400, str(10**18)
NOT_UTF8 = os.fsdecode(b"\xff")

REFUSED = (
    # names that are no UTF-8, with NUL, with markup, and long ones
    ("plan", NOT_UTF8, "is not UTF-8"), ("show", NOT_UTF8, "is not UTF-8"),
    (*PLAN, f"train.steps={NOT_UTF8}", "is not UTF-8"),
    ("train", "gpt-tiny", "--folder", NOT_UTF8, "is not UTF-8"),
    ("plan", "gpt\0", r"gpt\x00"), (*PLAN, "--out", "a\0.toml", r"a\x00.toml"),
    ("plan", "[red]x[/]", "`[red]x[/]`"), ("plan", "gpt-tiny", "--on", "[/]", "`[/]`"),
    (*PLAN, "[/]=3", "`[/]`"), ("runs", "--runs", "text.txt", "no folder of runs"),
    ("plan", LONG, "(300 characters)"), ("plan", "gpt-tiny", "--on", LONG, "file name too long"),
    ("plan", f"{LONG}.py:build", "file name too long"), ("show", LONG, "file name too long"),
    (*PLAN, "--file", f"{LONG}.toml", "file name too long"),
    (*PLAN, "--out", f"{LONG}.toml", "file name too long"),
    # nested keys
    (*PLAN, f"{'.'.join('a' * 20_000)}=1", "more than 32 deep"),
    (*PLAN, f"train.betas={'[' * 20_000}{']' * 20_000}", "more than 32 deep"),
    (*PLAN, "--file", "keys.toml", "more than 32 deep"),
    (*PLAN, "--file", "arrays.toml", "more than 32 deep"),
    (*PLAN, "--file", "tables.json", "more than 32 deep"),
    # numbers
    *((*PLAN, f"{key}={DIGITS}", "larger than any setting") for key in (
        "train.steps", "train.batch", "train.seed", "model.layers", "parallel.data", "phases",
    )),
    (*PLAN, f"train.steps={'9' * 5000}", "4300 digits"),
    (*PLAN, f"train.steps=0x{'f' * 5000}", "larger than any setting"),
    (*PLAN, "--memory", DIGITS, "is larger than any number"),
    ("plan", "gpt-tiny", "--on", f"dgx-h100:{'9' * 5000}", "not a number of hosts"),
    *((*PLAN, f"{key}={HUGE}", "should be less than or equal to") for key in (
        "train.batch", "model.layers", "model.width", "model.vocabulary", "model.sequence",
        "data.vocabulary", "batch.micro", "batch.accumulation", "parallel.pipeline", "phases",
    )),
    ("batch", "gpt-tiny", "--on", "h100", "--sizes", HUGE, "should be less than or equal to"),
    (*PLAN, "train.batch=1e18", "should be less than or equal to"),
    *((*PLAN, f"{key}=inf", "finite number") for key in (
        "train.learning_rate", "train.weight_decay", "train.epsilon", "train.hang_timeout_seconds",
    )),
    (*PLAN, "train.clip=nan", "greater than 0"),
    # what is no regular file
    (*PLAN, "--file", "/dev/zero", "is not a regular file"),
    (*PLAN, "--file", "pipe", "is not a regular file"),
    (*PLAN, "--file", "folder.toml", "is a folder"),
    (*PLAN, "--file", "sparse.toml", "more than"),
    ("plan", "gpt-tiny", "--on", "zero.toml", "is not a regular file"),
    ("plan", "pipe.py:build", "no file `pipe.py`"),
    ("train", "--plan", "zero.toml", "is not a regular file"),
    ("validate", "zero.csv", "is not a regular file"),
    ("validate", "pipe.csv", "is not a regular file"),
    # files where no folder is
    *((*PLAN, option, f"nowhere/{file}", "there is no folder `nowhere`") for option, file in (
        ("--out", "plan.toml"), ("--picture", "plan.svg"), ("--trace", "plan.json"),
    )),
    ("report", "last", "--trace", "nowhere/trace.json", "there is no folder `nowhere`"),
    ("machines", "compare", "gpt-tiny", "--picture", "nowhere/a.svg", "there is no folder"),
    # two lines in one value
    (*PLAN, "train.steps=3\nmachine=4", "should be a valid integer"),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with hostile files and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "keys.toml").write_text(f"{'.'.join('a' * 20_000)} = 1\n")
    (tmp_path / "arrays.toml").write_text(f"a = {'[' * 20_000}{']' * 20_000}\n")
    (tmp_path / "tables.json").write_text('{"a":' * 20_000 + "1" + "}" * 20_000)
    (tmp_path / "sparse.toml").touch()
    os.truncate(tmp_path / "sparse.toml", 2**40)
    for name in ("pipe", "pipe.py", "pipe.csv"):
        os.mkfifo(tmp_path / name)
    for name in ("zero.toml", "zero.csv"):
        (tmp_path / name).symlink_to("/dev/zero")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line says that ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    message = capsys.readouterr().err
    assert end.value.code == 2, message
    return message


def test_a_hostile_input_is_one_sentence_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for *words, told in REFUSED:
        message = refused(capsys, *words)
        assert told in message, words
        assert "Traceback" not in message, words
        assert message.count("\n") == 1, words
        assert len(message) < 600, words
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 2**19
    assert not (folder / "runs").exists()


def test_many_faults_of_one_kind_are_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "many.toml").write_text("".join(f"key{i} = {i}\n" for i in range(40)))
    message = refused(capsys, *PLAN, "train.stepz=3", "--file", "many.toml")
    assert "did you mean `train.steps`?" in message
    assert "many.toml:3: unknown key `key2`\n... and 37 more like it" in message
    assert message.count("\n") == 5


@pytest.mark.parametrize(
    ("code", "line"),
    [("import sys\nsys.exit(0)\n", 2), ("def build():\n    raise SystemExit('bye')\n", 2)],
)
def test_a_model_file_that_calls_exit_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], code: str, line: int
) -> None:
    (folder / "own.py").write_text(code)
    message = refused(capsys, "plan", "own.py:build")
    assert "`own.py:build` calls exit at" in message
    assert f"own.py:{line};" in message


def test_names_with_markup_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "--runs", "[/red]"])
    assert "no runs in `[/red]` yet" in capsys.readouterr().out


def test_no_name_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    controls = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066)))
    main(["runs", "--runs", f"\x1b]0;title\x07{controls.replace(chr(0), '')}"])
    out = capsys.readouterr().out
    assert "no runs in `" in out
    assert {char for char in out if not char.isprintable()} <= {"\n", "\t"}
