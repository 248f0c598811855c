"""Damage to any file of a run or of the cache is noticed, or changes nothing that the run does."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from factories import tiny_machine
from windlass.errors import WindlassError
from windlass.hardware.local_machine import save_local_machine, system_fingerprint

MODEL, *OVERRIDES = TINY
CASES = 4
"""Cases for each file."""
UNUSED = (".lock", "report.html")
"""Files that nothing reads."""


def damaged(content: bytes, seed: str) -> bytes:
    """The content with another digit, with another bit, or cut, at a random place."""
    pick = random.Random(seed)
    place = pick.randrange(len(content))
    kind = pick.choice(("digit", "bit", "cut"))
    digits = [i for i, byte in enumerate(content) if byte in b"0123456789"]
    if kind == "digit" and digits:
        place = pick.choice(digits)
        new = str((int(chr(content[place])) + pick.randrange(1, 10)) % 10).encode()
        return content[:place] + new + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    return content[:place] + bytes([content[place] ^ 1 << pick.randrange(8)]) + content[place + 1 :]


def outcome(folder: Path) -> list[tuple[int, float, float]] | str:
    """The steps of the resumed run, or the sentence that refuses it."""
    try:
        windlass.load(folder)
        windlass.report(folder)
        steps = [(s.step, s.loss, s.gradient_norm) for s in windlass.resume(folder)]
        text = "".join(windlass.sample(folder, "3 times ", tokens=3))
    except WindlassError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a trace is what must not be
        return f"{type(error).__name__}:\n{error}"
    return [*steps, (0, float(len(text)), 0.0)]


@pytest.fixture
def stopped(home: Path) -> Path:
    """The folder of a run that was stopped after 5 of its 8 steps, with checkpoints of 2 and 4."""
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=8", "train.save_every=2")
    run = windlass.train(MODEL, *words, root=home / "runs")
    next(step for step in run if step.step == 5)
    return run.folder


def files(folder: Path) -> Iterator[Path]:
    """All files of a folder that something reads."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in UNUSED and path.stat().st_size:
            yield path


@pytest.mark.slow
def test_damage_to_a_run_is_said_in_a_sentence_or_changes_nothing(
    stopped: Path, tmp_path: Path
) -> None:
    def resumed_after(harm: tuple[Path, bytes] | None) -> list[tuple[int, float, float]] | str:
        copy = tmp_path / "copies" / stopped.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(stopped, copy)
        if harm:
            (copy / harm[0]).write_bytes(harm[1])
        return outcome(copy)

    whole = resumed_after(None)
    assert isinstance(whole, list)
    silent: list[str] = []
    for path in files(stopped):
        name = path.relative_to(stopped)
        for case in range(CASES):
            result = resumed_after((name, damaged(path.read_bytes(), f"{name} {case}")))
            # From the checkpoint of step 2 the same steps come, after two more.
            same = isinstance(result, list) and result[-len(whole) :] == whole
            if not (same or (isinstance(result, str) and "\n" not in result)):
                silent.append(f"{name} {case}: {result}")
    assert silent == []


@pytest.mark.slow
def test_damage_to_the_cache_changes_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "windlass"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=2")
    machine = tiny_machine(memory="8 GiB").model_copy(
        update={"name": "here", "system": system_fingerprint()}
    )

    def losses(run: int) -> list[tuple[str, float, int]]:
        made = windlass.train(MODEL, *words, folder=home / f"run{run}")
        plan, prediction = made.planned.plan, made.planned.prediction
        return [
            (plan.label, prediction.step_seconds, prediction.peaks[0].peak_bytes),
            *((str(step.step), step.loss, 0) for step in made),
        ]

    save_local_machine(cache, machine)
    whole = losses(0)
    good = {path: path.read_bytes() for path in files(cache)}
    names = [path for path in good if path.suffix != ".so" and path.name != "here.toml"]
    for number, path in enumerate(names * CASES, start=1):
        path.write_bytes(damaged(good[path], f"{path.name} {number}"))
        assert losses(number) == whole, path
        for other, content in good.items():
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(content)
