"""Contestants of a benchmark: each in a process of its own, which takes one step at its turn."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Step = Callable[[], float]
"""Takes one step and returns its loss. Its attribute `figures`, if it has one, is a function whose
figures the parent may ask for."""


class Contestant:
    """A process that takes one step on request.

    Args:
        name: what it is called in tables.
        command: starts a script that calls `take_turns`.
        environment: variables beside those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.losses: list[float] = []
        """Those of all steps so far."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | dict(environment),
        )  # fmt: skip

    def step(self) -> float:
        """Takes one step and returns its seconds by the process's own clock."""
        seconds, loss = self._ask("step").split()
        self.losses.append(float(loss))
        return float(seconds)

    def figures(self) -> dict[str, float]:
        """What the loop says of itself: predictions, and its peak of memory since the last time."""
        figures: dict[str, float] = json.loads(self._ask("figures"))
        return figures

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        return answer

    def huge_page_bytes(self) -> int:
        """Bytes of the process that lie in transparent huge pages now."""
        return self._kibibytes("smaps_rollup", "AnonHugePages:") * 1024

    def forget_peak(self) -> None:
        """Lets `peak_bytes` begin again, so that loading and compiling count for nothing."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Most bytes of the process in memory at once since its peak was forgotten."""
        return self._kibibytes("status", "VmHWM:") * 1024

    def end(self) -> None:
        """Kills the process, which is waiting for its next turn."""
        self._process.kill()
        self._process.wait()

    def _kibibytes(self, file: str, name: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/{file}").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])


def take_turns(start: Callable[[], Step]) -> None:
    """Runs in a contestant's process: takes a step for each line `step`.

    It writes the step's seconds and loss, and the loop's figures for each line `figures`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    step = start()
    for word in sys.stdin:
        if word.strip() == "figures":
            answers.write(json.dumps(step.figures()) + "\n")  # type: ignore[attr-defined]
        else:
            begin = time.perf_counter()
            loss = step()
            answers.write(f"{time.perf_counter() - begin} {loss}\n")
        answers.flush()


def compare(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[float]]:
    """Warms up every contestant, then times `rounds` interleaved steps of each."""
    for contestant in contestants:
        start = time.perf_counter()
        for _ in range(2):
            contestant.step()
        contestant.forget_peak()
        print(f"{contestant.name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            seconds[contestant.name].append(contestant.step())
        last = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
        print(f"round {number + 1}: {last}", flush=True)
    return seconds


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest of our seconds over theirs, round by round."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(each), each[0], each[-1]
