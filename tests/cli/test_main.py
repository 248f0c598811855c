"""The command line itself: what it refuses, how it says so, and that it answers at once."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cli.rank_processes import ended
from command_line import Windlass, start
from windlass.child_processes import module_command
from windlass.cli import console as output
from windlass.cli.main import app, main

TOO_LARGE = ("gpt-tiny", "model.layers=1", "model.vocabulary=257", "--memory", "1MiB")
"""A small model and less memory than any plan of it needs."""


def test_all_errors_of_a_command_line_are_reported_at_once(refused: Windlass) -> None:
    done = refused("train", "gpt-tiny", "train.stepz=3", "batch.micro=many", "memory=3 GiBB")

    assert done.returncode == 2
    for words in ("did you mean `train.steps`?", "`batch.micro` = 'many'", "3 GiBB"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("train", "gpt-tini"), "did you mean `gpt-tiny`?"),
        (("plan", "gpt-tiny", "--on", "h1000"), "h1000"),
        (("train", "gpt-tiny", "--file", "nowhere.toml"), "no file `nowhere.toml`"),
        (("train", "gpt-tiny", "data.source=nowhere.txt"), "nowhere.txt"),
        (("train", "nowhere.py:build"), "nowhere.py"),
        (("train", "gpt-tiny", "--on", "a100-80gb"), "not this one"),
        (("fit", "gpt-tiny", "--memory", "0"), "greater than 0"),
        (("show", "nothing"), "no run"),
        (("resume", "nothing"), "no run"),
        (("frobnicate",), "unknown command `frobnicate`; `windlass --help` lists all"),
        (("compare", "a", "b"), "did you mean `diff` or `machines compare`?"),
        (("machines", "lst"), "`lst` is too much for `windlass machines`; did you mean `list`?"),
        (("show", "last", "a", "b"), "`a` and 1 more are too much for `windlass show`"),
        (("train", "gpt-tiny", "--stepz", "3"), "unknown option `--stepz`"),
        (("train", "gpt-tiny", "--lr=3"), "write it as a key: `train.learning_rate=...`"),
        (("show", "--josn"), "did you mean `--json`?"),
        (("evaluate",), "`windlass evaluate` needs `RUN`"),
        (("train", "--model", "gpt-tiny"), "write its value alone: `windlass train MODEL`"),
        (("plan", "gpt-tiny", "--on"), "needs a value behind `--on`"),
    ],
)
def test_an_unknown_name_is_one_clear_message_and_exit_code_2(
    refused: Windlass, words: tuple[str, ...], told: str
) -> None:
    done = refused(*words)

    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "spins"), [(None, "1000"), ("OMP_WAIT_POLICY", None), ("GOMP_SPINCOUNT", "7")]
)
def test_threads_of_openmp_spin_briefly_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, spins: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "7")
        if name != variable:
            monkeypatch.delenv(name)
    main(["models"])
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize("chosen", [None, "/elsewhere"])
def test_compiled_code_is_kept_in_the_users_cache_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    main(["models"])
    kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert kept == (chosen or str(tmp_path / "windlass" / "compiled"))


def test_a_refusal_hangs_below_its_first_word_on_a_terminal_and_is_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = f"{'word ' * 30}\n- {'item ' * 30}".rstrip()
    shown = StringIO()
    monkeypatch.setattr(
        output,
        "error_console",
        Console(file=shown, width=60, force_terminal=True, color_system=None),
    )
    output.print_error(message)
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("windlass: word")
    assert lines[1].startswith(" " * 10 + "word")
    assert sum(line.startswith(" " * 8 + "- item") for line in lines) == 1
    piped = StringIO()
    monkeypatch.setattr(output, "error_console", Console(file=piped, width=60))
    output.print_error(message)
    assert piped.getvalue() == f"windlass: {message}\n"


def test_work_that_goes_on_has_lines_in_a_log_and_none_in_a_log_of_what_is_soon_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = StringIO()
    monkeypatch.setattr(output, "error_console", Console(file=shown, width=60))
    with output.ProgressBars() as progress:
        progress("searching", 1, 4)
    assert shown.getvalue() == ""
    monkeypatch.setattr(output, "_MIN_LINE_SECONDS", 0.01)
    with output.ProgressBars() as progress:
        progress("searching", 1, 4)
        deadline = time.monotonic() + 10
        while shown.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = shown.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"searching, 25 %, [\d.]+ m?s so far", line) for line in lines)


def test_lines_of_a_log_are_ten_seconds_apart_at_first_and_ten_minutes_at_most() -> None:
    assert [output.line_interval(seconds) for seconds in (0, 90, 600, 86400)] == [10, 10, 60, 600]


def test_planning_and_help_answer_without_torch_and_help_without_other_rooms(
    windlass: Windlass, surroundings: dict[str, str]
) -> None:
    code = (
        "import sys\n"
        "from windlass.cli.main import main\n"
        "for words in sys.argv[1:]:\n"
        "    try: main(words.split())\n"
        "    except SystemExit as end: print('code', end.code)\n"
        "    print('torch after', words, 'torch' in sys.modules)\n"
        "    print('rooms after', words, 'windlass.schema' in sys.modules)\n"
    )
    windlass("plan", "gpt-tiny")  # captures the model once, which takes torch

    done = subprocess.run(
        (sys.executable, "-c", code, "--help", "plan gpt-tiny", "models", "machines"),
        env=surroundings, capture_output=True, text=True, check=True,
    )  # fmt: skip

    told = [line.split()[-1] for line in done.stdout.splitlines() if line[:11] == "torch after"]
    assert told == ["False"] * 4
    assert "rooms after --help False" in done.stdout


def test_fit_says_no_with_the_bytes_that_lack_and_what_would_help(windlass: Windlass) -> None:
    done = windlass("fit", *TOO_LARGE)

    assert done.returncode == 1
    assert done.stdout.startswith("no")
    assert "too little" in done.stdout
    assert "what would help" in done.stdout


def test_a_model_that_does_not_fit_is_not_trained(refused: Windlass) -> None:
    done = refused("train", *TOO_LARGE)

    assert done.returncode == 2
    assert "what would help" in done.stderr


def test_help_describes_each_command_in_the_order_of_use(windlass: Windlass) -> None:
    told = windlass("--help").stdout

    first = (r"train +Plan, predict, run", r"sample +Let a", r"show +Show one run")
    places = [re.search(words, told).start() for words in first]
    assert places == sorted(places)


def test_json_is_for_other_programs_and_agrees_with_the_exit_code(windlass: Windlass) -> None:
    yes = windlass("fit", "gpt-tiny", "--json")
    no = windlass("fit", *TOO_LARGE, "--json")
    planned = windlass("plan", "gpt-tiny", "--json")
    runs = windlass("runs", "--json")

    assert (yes.returncode, json.loads(yes.stdout)["fits"]) == (0, True)
    assert (no.returncode, json.loads(no.stdout)["fits"]) == (1, False)
    peaks = json.loads(planned.stdout)["prediction"]["peaks"]
    assert peaks == json.loads(yes.stdout)["peaks"]
    assert json.loads(planned.stdout)["plan"] == json.loads(yes.stdout)["plan"]
    assert json.loads(runs.stdout) == []


def test_a_default_batch_that_does_not_fit_is_lowered_and_says_so(windlass: Windlass) -> None:
    words = ("gpt-tiny", "--on", "a100-40gb", "--memory", "1.62GiB")
    done = windlass("fit", *words)
    assert done.returncode == 0
    assert "train.batch=4 (the usual 16 does not fit)" in " ".join(done.stdout.split())
    assert windlass("fit", *words, "train.batch=16").returncode == 1


def test_every_command_has_a_row_in_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    rows = "".join(line for line in page.read_text().splitlines() if line.startswith("| `"))
    shown = {name for name in app if not name.startswith("-") and app[name].show}
    assert len(shown) > 30
    assert {name for name in shown if not re.search(rf"`(windlass )?{name}\b", rows)} == set()


@pytest.mark.parametrize("words", [("machines",), ("keys", "lora"), ("plan", "--help"), ()])
def test_no_line_in_a_pipe_ends_in_spaces(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    main([*words])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line.endswith(" ")] == []


def piped(words: str, reader: str, surroundings: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose output goes to another program."""
    command = f"{shlex.quote(sys.executable)} -m windlass {words} | {reader}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder, env=surroundings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_output_that_nobody_reads_is_no_error(surroundings: dict[str, str], tmp_path: Path) -> None:
    assert piped("models", "true", surroundings, tmp_path) == (0, "")


@pytest.mark.slow
def test_a_run_whose_reader_ends_stops_with_a_checkpoint(
    surroundings: dict[str, str], tmp_path: Path
) -> None:
    words = "train gpt-tiny model.layers=1 train.sequence=16 train.batch=2 train.steps=2000"
    code, told = piped(words, "grep -m 1 '^step 1/'", surroundings, tmp_path)
    assert (code, "Traceback" in told) == (130, False)
    assert "stopped after step" in told
    assert list(tmp_path.glob("runs/*/checkpoints/step-*"))


@pytest.mark.parametrize("is_colored", [True, False])
def test_a_terminal_that_asks_for_no_color_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_colored: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if a terminal read it
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not is_colored:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(output, "error_console", output._console(stderr=True))
    output.print_error("it is wrong")

    assert ("\x1b[1;31m" in capsys.readouterr().err) == is_colored


@pytest.fixture
def _ctrl_c_ends_processes() -> Iterator[None]:
    """Signals as at a terminal: a shell that starts the tests behind its back has them ignored."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_ctrl_c_ends_processes")
def test_an_interrupt_while_a_command_is_imported_is_one_line_and_exit_code_130(
    surroundings: dict[str, str], tmp_path: Path
) -> None:
    process = start(surroundings, tmp_path, "train", "gpt-tiny")
    libraries = Path(f"/proc/{process.pid}/maps")
    try:
        while "pydantic_core" not in libraries.read_text():
            assert process.poll() is None, "it ended before it was interrupted"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert ended(process) == "windlass: interrupted\n"
        assert process.returncode == 130
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ("train", "gpt-tiny")),
        (signal.SIGTERM, ("sweep", "gpt-tiny", "train.seed=1,2")),
        (signal.SIGHUP, ("plan", "gpt-tiny")),
        (signal.SIGTERM, ("probe",)),
    ],
)
@pytest.mark.usefixtures("_ctrl_c_ends_processes")
def test_a_stop_signal_ends_a_command_that_measures_the_machine(
    number: signal.Signals, words: tuple[str, ...], surroundings: dict[str, str], tmp_path: Path
) -> None:
    process = start(surroundings | {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path, *words)
    try:
        assert process.stderr
        assert "measuring" in process.stderr.readline()
        process.send_signal(number)
        _, news = process.communicate(timeout=20)
        assert news.splitlines()[-1] == "windlass: interrupted"
        assert process.returncode == 130
    finally:
        process.kill()


def test_a_file_named_as_one_of_pythons_modules_is_not_imported_in_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "numbers.py").write_text("raise RuntimeError('imported')")
    command = (*module_command("windlass"), "--version")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_little_memory_to_load_torch_is_one_sentence_and_no_bug(tmp_path: Path) -> None:
    words = shlex.join(module_command("windlass", "train", "gpt-tiny", "--folder", "run"))
    done = subprocess.run(
        ("sh", "-c", f"ulimit -v 400000; exec {words}"),
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") <= 2
    assert "a process may have 390 MiB of memory here, and loading torch alone takes" in done.stderr
