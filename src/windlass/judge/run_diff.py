"""What differs between runs: which of their inputs and how, and their results beside the noise."""

import contextlib
import copy
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from windlass.atomic_files import read_regular_file
from windlass.judge.moderated_t import NoisePrior, moderated_t
from windlass.record import RunRow
from windlass.schema import InputName
from windlass.tracking import INPUT_FILES, input_fingerprints

InputState = Literal["same", "different", "not recorded"]
_DIFF_KEYS = ("windlass.diff", "project.diff")
"""The keys of the code whose texts are compared line by line."""
_MOST_KEYS = 200
"""Keys of one input that are listed; a graph of another model differs in thousands."""
_SMALLEST_SHARE = 0.01
"""A kind of instruction that takes less of a step in every run is left out."""
_SQRT_2 = math.sqrt(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDifference:
    """One key of an input whose values differ."""

    input: InputName
    key: str
    """Dotted, such as `train.learning_rate` or `packages.torch`."""
    values: tuple[str | None, ...]
    """The value in each run; None where a run does not have the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """How much runs that are alike differ in one number, on a logarithmic scale."""

    deviation: float
    """Standard deviation between runs of the number's logarithm."""
    peers: int
    """Runs that it was measured on; 0 if it is the usual one of other plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDifference:
    """One number of the results of each run."""

    name: str
    unit: Literal["nats", "seconds", "bytes", "tokens/s"]
    values: tuple[float | None, ...]
    noise: NoiseFloor | None
    """None where no floor is known, as of a loss without peers."""

    def sigmas(self, index: int) -> float | None:
        """How far a run is from the first one, in deviations of the difference of two like runs."""
        first, other = self.values[0], self.values[index]
        if self.noise is None or not first or not other or first <= 0 or other <= 0:
            return None
        return math.log(other / first) / (_SQRT_2 * self.noise.deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """What differs between runs; the first one is what the others are compared with."""

    runs: tuple[RunRow, ...]
    inputs: Mapping[InputName, InputState]
    keys: tuple[KeyDifference, ...]
    """By input, then by key."""
    omitted: Mapping[InputName, int]
    """How many more keys of an input differ than `keys` lists."""
    code: tuple[str, ...]
    """Lines of a unified diff between the uncommitted changes of the first and the last run."""
    results: tuple[ResultDifference, ...]

    @property
    def differing(self) -> tuple[InputName, ...]:
        """The inputs that differ."""
        return tuple(name for name, state in self.inputs.items() if state == "different")


def diff_runs(runs: Sequence[RunRow], noise: Mapping[str, NoiseFloor]) -> RunDiff:
    """What differs between runs.

    Args:
        runs: at least two.
        noise: the noise floor of results by name, such as `loss`, `seconds` or `seconds.forward`.
    """
    folders = [run.folder for run in runs]
    states = _input_states(folders)
    keys: list[KeyDifference] = []
    omitted: dict[InputName, int] = {}
    changes: list[str] = [""] * len(folders)
    for name in (name for name, state in states.items() if state == "different"):
        trees = [_input_keys(folder, name) for folder in folders]
        if name == "code":
            changes = ["".join(tree.pop(key, "") for key in _DIFF_KEYS) for tree in trees]
        differing = [
            KeyDifference(input=name, key=key, values=tuple(tree.get(key) for tree in trees))
            for key in sorted({key for tree in trees for key in tree})
            if len({tree.get(key) for tree in trees}) > 1
        ]
        keys += differing[:_MOST_KEYS]
        if len(differing) > _MOST_KEYS:
            omitted[name] = len(differing) - _MOST_KEYS
    first, last = changes[0].splitlines(), changes[-1].splitlines()
    return RunDiff(
        runs=tuple(runs),
        inputs=states,
        keys=tuple(keys),
        omitted=omitted,
        code=tuple(difflib.unified_diff(first, last, "first", "last", lineterm="")),
        results=tuple(_results(runs, noise)),
    )


def noise_floor(peers: Sequence[float], prior: NoisePrior) -> NoiseFloor:
    """The noise floor of a number, from runs that are alike and a prior.

    Args:
        peers: the positive number of each of those runs.
    """
    logs = [math.log(value) for value in peers if value > 0]
    deviation = moderated_t(logs[0], logs, prior).deviation if logs else prior.deviation
    return NoiseFloor(deviation=deviation, peers=len(logs))


def _input_states(folders: Sequence[Path]) -> dict[InputName, InputState]:
    fingerprints = [input_fingerprints(folder) for folder in folders]
    states: dict[InputName, InputState] = {}
    for name in get_args(InputName):
        prints = [fingerprint.get(name) for fingerprint in fingerprints]
        if all(one is None for one in prints):
            states[name] = "not recorded"
        else:
            states[name] = "same" if len(set(prints)) == 1 else "different"
    return states


def _input_keys(folder: Path, name: InputName) -> dict[str, str]:
    """The values of an input by dotted key, without what its fingerprint leaves out.

    Empty if the run did not keep it.
    """
    for one, file, kind in INPUT_FILES:
        if one == name and (folder / file).exists():
            with contextlib.suppress(OSError, ValueError, RecursionError):
                tree = _read_tree(folder / file)
                kept = {key: tree[key] for key in tree if key not in kind.fingerprint_excludes}
                return dict(flat_keys(kept))
    return {}


def _read_tree(path: Path) -> dict[str, Any]:
    text = read_regular_file(path).decode()
    tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    return tree if isinstance(tree, dict) else {}


def flat_keys(tree: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of nested tables; the items of a list count from 0."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat_keys(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, Mapping | list) for item in tree):
        for index, value in enumerate(tree):
            yield from flat_keys(value, f"{prefix}.{index}")
    elif isinstance(tree, str):
        yield prefix, tree
    else:
        yield prefix, json.dumps(tree)


def with_keys_of(good: dict[str, Any], bad: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The first tree with some dotted keys as the second has them; a list counts as one value."""
    mixed = copy.deepcopy(good)
    for key in keys:
        *path, last = _known_part(key, good, bad)
        value: Any = bad
        target = mixed
        for part in path:
            value = value.get(part, {}) if isinstance(value, dict) else {}
            target = target.setdefault(part, {})
        if last in value:
            target[last] = value[last]
        else:
            target.pop(last, None)
    return mixed


def _known_part(key: str, *trees: dict[str, Any]) -> list[str]:
    """A dotted key up to where it enters a list."""
    parts = key.split(".")
    for tree in trees:
        value: Any = tree
        for depth, part in enumerate(parts):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
            if isinstance(value, list):
                return parts[: depth + 1]
    return parts


def _results(runs: Sequence[RunRow], noise: Mapping[str, NoiseFloor]) -> Iterator[ResultDifference]:
    """The results that at least one run has."""
    kinds = sorted(
        {
            kind
            for run in runs
            for kind, seconds in run.kinds.items()
            if seconds >= _SMALLEST_SHARE * (run.seconds or 0.0)
        }
    )
    columns: list[tuple[str, Literal["nats", "seconds", "bytes"], list[float | None]]] = [
        ("loss", "nats", [run.loss for run in runs]),
        ("held_out_loss", "nats", [run.held_out_loss for run in runs]),
        ("seconds", "seconds", [run.seconds for run in runs]),
        *((f"seconds.{kind}", "seconds", [run.kinds.get(kind) for run in runs]) for kind in kinds),
        ("memory_bytes", "bytes", [run.memory_bytes for run in runs]),
    ]
    for name, unit, values in columns:
        if any(value is not None for value in values):
            yield ResultDifference(
                name=name, unit=unit, values=tuple(values), noise=noise.get(name)
            )
