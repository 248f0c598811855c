"""Every command line that README and docs print is one, and does what it promises."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_line import run_here
from made_cache import made_cache
from pages import PAGES, CommandLine, command_lines
from surroundings import BEFORE, ENDS, NAMES, NOT_RUN, PAGE_NAMES
from windlass import api
from windlass.cli.main import app

QUICK = re.compile(r"windlass (machines( new .*)?|stacks( \w+)?|recipe|keys|models|runs( .*)?)$")
"""Commands that answer at once."""
LARGE = "train.steps=2 train.batch=2 train.sequence=128 train.evaluate_sequences=2 compile=false"
TINY = "train.steps=8 train.batch=8 train.evaluate_sequences=8 compile=false"
TINY_TEXT = f"{TINY} train.sequence=64 data.limit_bytes=300000"
"""What makes a run of a large model, of a small one, and of one on the embedded text short."""
NO_SIZE = re.compile("--from|--plan|plan.toml")
"""Command lines whose sizes are those of a run or a plan that is there."""
COMPILED = "windlass train gpt-tiny train.steps=2"
SECONDS = 900.0

LINES = [line for page in PAGES for line in command_lines(page)]
OURS = [line for line in LINES if line.text.startswith("windlass ")]


def words(line: CommandLine) -> list[str]:
    """The words of one of our command lines, with what a reader puts in place of capitals."""
    names = NAMES | PAGE_NAMES.get(line.page, {})
    return [names.get(word, word) for word in shlex.split(line.text)[1:] if word != "..."]


def reason(line: CommandLine) -> str | None:
    """Why a line is not run; None if it is."""
    return next((why for start, why in NOT_RUN.items() if re.match(start, line.text)), None)


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    bin_ = tmp_path_factory.mktemp("bin")
    windlass = bin_ / "windlass"
    windlass.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m windlass "$@"\n')
    windlass.chmod(0o755)
    return {
        **os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "COLUMNS": "200",
        "XDG_CACHE_HOME": str(made_cache(tmp_path_factory)),
        "XDG_DATA_HOME": str(tmp_path_factory.mktemp("data")),
    }  # fmt: skip


def test_command_lines_are_found():
    assert len(OURS) > 120
    assert {"README.md", "docs/quickstart.md", "docs/guide/sweeps.md"} <= {x.page for x in OURS}


def test_no_reason_outlives_its_command_line():
    assert [start for start in NOT_RUN if not any(re.match(start, x.text) for x in LINES)] == []
    texts = {(line.page, line.text) for line in LINES}
    named = [(page, text) for page, lines in BEFORE.items() for text in lines if text]
    assert [one for one in named if one not in texts] == []
    assert [one for one in ENDS if one not in {line.text for line in LINES}] == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(x.page == page for x in OURS)])
def test_each_command_its_flags_and_its_keys_exist(page: str):
    for line in OURS:
        if line.page != page or line.refusal:
            continue
        _, bound, _ = app.parse_args(words(line), print_error=False, exit_on_error=False)
        given = bound.arguments
        if words(line)[0] != "sweep":
            model = given.get("model")
            keys = [word for word in (model, *given.get("overrides", ())) if word and "=" in word]
            is_here = model is not None and model not in keys and not model.startswith("hf:")
            api.make_request(model if is_here else None, *keys)


ANSWERING = [
    line for line in OURS
    if QUICK.match(line.text) and reason(line) is None and line.page not in BEFORE
]  # fmt: skip


@pytest.mark.parametrize("line", ANSWERING, ids=lambda line: line.text)
def test_what_answers_at_once_answers(
    line: CommandLine, surroundings: dict[str, str], tmp_path: Path
):
    done = run_here(tuple(words(line)), surroundings, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line", [x for x in OURS if x.refusal and x.page not in BEFORE], ids=lambda line: line.text
)
def test_a_printed_refusal_is_the_one_that_is_given(
    line: CommandLine, surroundings: dict[str, str], tmp_path: Path
):
    done = run_here(tuple(words(line)), surroundings, tmp_path)
    assert done.returncode == 2
    assert without_names(line.refusal) in without_names(done.stderr)


def without_names(text: str) -> str:
    """A text in one line, without fingerprints and the names of runs."""
    text = re.sub(r"(runs/)?\d{4}-\d\d-\d\d-[\w.-]+", "...", " ".join(text.split()))
    return re.sub(r"`[0-9a-f]{12}`", "``", text)


def shortened(text: str) -> str:
    """The same command line with a twentieth of the steps, and small batches.

    Layers are compiled in a line of the quickstart alone: to compile takes longer than all else.
    A run that goes on keeps its steps: they are more than those of the stopped one before it.
    """
    if "--continue" in text:
        return text
    text = re.sub(r"(train\.steps=|evaluate_tasks_every=|@)(\d+)",
                  lambda one: f"{one[1]}{max(2, int(one[2]) // 20)}", text)  # fmt: skip
    text = text.replace("--trials 20", "--trials 2").replace(
        "--seeds 5 --steps 100", "--seeds 3 --steps 4"
    )
    if text == COMPILED:
        return text
    if re.match(r"windlass (train|sweep (?!show)) *", text) and not re.search(
        "--from|--plan", text
    ):
        return with_keys(text, size_of(text))
    return with_keys(text, TINY) if "--from" in text else text


def size_of(text: str) -> str:
    """The keys that make the run of a command line short."""
    if re.search(r"gpt2-\d", text):
        return LARGE
    is_text = re.search(r" (gpt|llama|bert|moe)-tiny", text) and "data.source" not in text
    return TINY_TEXT if is_text else TINY


def with_keys(text: str, keys: str) -> str:
    """A command line with those keys that it does not have."""
    given = set(re.findall(r"([\w.]+)=", text))
    if text.startswith("windlass check "):
        given.add("train.steps")  # it knows how many it needs
    return " ".join((text, *(key for key in keys.split() if key.partition("=")[0] not in given)))


def steps_of(page: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """What is run of a page: command, exit codes that are good, and the refusal that is printed."""
    before, names = BEFORE.get(page, {}), NAMES | PAGE_NAMES.get(page, {})
    if "" in before:
        yield before[""], (0,), ""
    for line in command_lines(page):
        if reason(line) is not None:
            continue
        if line.text in before:
            yield before[line.text], (0,), ""
        text = re.sub(r"\b[A-Z]+\b", lambda one: names.get(one[0], one[0]), line.text)
        good = (2,) if line.refusal else ENDS.get(line.text, (0,))
        yield text if line.refusal else shortened(text), good, line.refusal


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if list(steps_of(page))])
def test_the_command_lines_of_a_page_run_in_order(
    page: str, surroundings: dict[str, str], tmp_path: Path
):
    failed = []
    for command, good, refusal in steps_of(page):
        done = subprocess.run(
            ("bash", "-c", command), cwd=tmp_path, env=surroundings, capture_output=True,
            text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        said = without_names(done.stderr)
        if done.returncode not in good or without_names(refusal) not in said:
            failed.append(f"{command}\n  ended with {done.returncode}, not {good}: {said[-600:]}")
    assert failed == [], "\n".join(failed)
