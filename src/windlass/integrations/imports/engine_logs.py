"""Reads the logs that engines of others write, by files of data: one run from one log."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from windlass.atomic_files import open_regular_file
from windlass.document import Document
from windlass.errors import RecordError, RequestError, did_you_mean, shorten

_MOST_BYTES, _MOST_LINE, _MOST_STEPS = 2**31, 2**13, 2_000_000
_MOST_JSON = 2**27
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^\s*(?:\[(?:default|rank)(\d+)\]:|(\d+):\s)")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_WARM_UP_STEPS, _WARM_UP_FACTOR = 10, 1.5
"""Among so many first steps, those that take so many times the median are warm-up."""


class LogFormat(Document):
    """How an engine writes its steps."""

    name: str
    about: str
    source: str
    form: Literal["lines", "jsonl", "json"]
    record: str
    """Pattern of where a step begins, with its number; of JSON, the key of the number."""
    steps: tuple[str, ...] = ()
    """Further keys of the number."""
    fields: dict[str, str]
    """Pattern or key of each field, by a name that says its unit."""
    later: dict[str, str] = Field(default_factory=dict)
    """Patterns of lines of their own, which belong to the step before."""
    needs: tuple[str, ...]
    """Fields without which a step is damaged."""
    prefix: str | None = None
    """What stands before the JSON of a line; other lines are left out."""
    under: str | None = None
    """Key of the list of steps in a JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSize:
    """What a log does not say of a run: its batch and its ranks; None where nobody does."""

    tokens: int | None = None
    """Tokens of a step over all replicas."""
    samples: int | None = None
    """Sequences of a step over all replicas."""
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStep:
    """One step of a log."""

    step: int
    time: float | None
    """Seconds since 1970."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """The steps of a log, and what could not be read of it."""

    steps: tuple[LogStep, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many things of each kind."""


def log_formats() -> tuple[str, ...]:
    """Names of the formats."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def load_log_format(name: str) -> LogFormat:
    """The format of a name; Megatron's for all that log as it does.

    Raises:
        RequestError: no such format.
    """
    own = name.partition("@")[0]
    known = log_formats()
    own = {"megatron-lm": "megatron", "megatron-bridge": "megatron", "nemo": "megatron"}.get(
        own, own
    )
    if own not in known:
        raise RequestError(
            f"no format of logs `{shorten(name)}`{did_you_mean(name, known)}; known are "
            f"{', '.join(f'`{each}`' for each in known)}"
        )
    return LogFormat.load(_folder() / f"{own}.toml")


def read_log(paths: Sequence[Path], form: LogFormat, size: LogSize) -> ReadLog:
    """The steps of the files of one run, in order; a repeated step counts as it was last.

    Args:
        paths: the files in the order in which they were written, such as one for each restart.
        form: who wrote them.
        size: what they do not say.

    Raises:
        RecordError: a file cannot be read, or holds no step.
    """
    left_out: Counter[str] = Counter()
    steps: dict[int, LogStep] = {}
    for path in paths:
        for step in _steps(path, form, left_out):
            if len(steps) > _MOST_STEPS:
                raise RecordError(f"`{path}` has more than {_MOST_STEPS} steps; name one run's log")
            if step.step in steps:
                # What came after the step of a restart was lost with it.
                kept = {number: one for number, one in steps.items() if number < step.step}
                left_out["steps that a restart repeated"] += len(steps) - len(kept)
                steps = kept
            steps[step.step] = step
    if not steps:
        raise RecordError(
            f"`{paths[0]}` holds no step as `{form.name}` writes it ({form.about}); name another "
            "`--stack`"
        )
    ordered = [steps[number] for number in sorted(steps)]
    timed = [
        _with_seconds(one, before, size)
        for one, before in zip(ordered, [None, *ordered[:-1]], strict=True)
    ]
    without = sum("seconds" not in each.values for each in timed[1:])
    if without:
        left_out["steps whose time is not known (name the plan by `--plan`)"] += without
    return ReadLog(steps=_without_warm_up(timed), left_out=dict(left_out))


def _steps(path: Path, form: LogFormat, left_out: Counter[str]) -> Iterator[LogStep]:
    if form.form == "json":
        yield from _json_steps(_parsed_file(path), form, left_out)
    elif form.form == "jsonl":
        yield from _json_steps(_parsed_lines(path, form, left_out), form, left_out)
    else:
        yield from _line_steps(path, form, left_out)


def _lines(path: Path, left_out: Counter[str]) -> Iterator[str]:
    """Lines without colours; those of another rank than the first to log a step are counted."""
    read = 0
    try:
        with open_regular_file(path) as file:
            while line := file.readline(_MOST_LINE + 1):
                read += len(line)
                if read > _MOST_BYTES:
                    raise RecordError(f"`{path}` is larger than {_MOST_BYTES >> 30} GiB; cut it")
                if len(line) > _MOST_LINE:
                    left_out["lines that are too long"] += 1
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_MOST_LINE)
                        read += len(line)
                    continue
                yield _ANSI.sub("", line.decode(errors="replace"))
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}") from None


def _line_steps(path: Path, form: LogFormat, left_out: Counter[str]) -> Iterator[LogStep]:
    record = re.compile(form.record)
    patterns = {name: re.compile(text) for name, text in form.fields.items()}
    later = {name: re.compile(text) for name, text in form.later.items()}
    rank: str | None = None
    last: LogStep | None = None
    for line in _lines(path, left_out):
        starts = list(record.finditer(line))
        prefix = _RANK.match(line)
        own = prefix and (prefix[1] or prefix[2])
        if starts and rank is None:
            rank = own
        if own is not None and rank is not None and own != rank:
            left_out["lines of other ranks"] += bool(starts)
            continue
        if last is not None and not starts:
            for name, value in _found(later, line).items():  # of several ranks the fullest counts
                last.values[name] = max(value, last.values.get(name, value))
        # Writers that share a stream may put two records into one line.
        ends = [*(match.start() for match in starts[1:]), len(line)][: len(starts)]
        for start, end in zip(starts, ends, strict=True):
            first = 0 if start is starts[0] else start.start()
            values = _found(patterns, line[first:end])
            if not set(form.needs) <= set(values):
                left_out["damaged steps"] += 1
                continue
            if last is not None:
                yield last
            last = LogStep(
                step=int(start[1][:18]), time=_time(line[: start.start()]), values=values
            )
    if last is not None:
        yield last


def _found(patterns: Mapping[str, "re.Pattern[str]"], text: str) -> dict[str, float]:
    matches = ((name, pattern.search(text)) for name, pattern in patterns.items())
    numbers = ((name, _number(match[1])) for name, match in matches if match is not None)
    return {name: number for name, number in numbers if number is not None}


def _number(value: object) -> float | None:
    """A number, whatever separates its thousands; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError):
        return None


def _time(line: str) -> float | None:
    """Seconds since 1970 of the last time stamp of a line, read as UTC."""
    stamps = list(_TIME.finditer(line))
    if not stamps:
        return None
    stamp = stamps[-1]
    try:
        moment = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{stamp[3] or 0}")


def _parsed_file(path: Path) -> Iterator[object]:
    try:
        with open_regular_file(path) as file:
            text = file.read(_MOST_JSON + 1)
        tree = json.loads(text) if len(text) <= _MOST_JSON else None
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RecordError(
            f"`{path}` is no whole JSON file: it is damaged, or was cut off; name an earlier "
            "checkpoint's"
        ) from None
    yield tree


def _parsed_lines(path: Path, form: LogFormat, left_out: Counter[str]) -> Iterator[object]:
    for line in _lines(path, left_out):
        text = line.strip()
        if form.prefix is not None:
            _, found, text = text.partition(form.prefix)
            if not found:
                continue
        if text:
            try:
                yield json.loads(text)
            except (ValueError, RecursionError):
                left_out["damaged lines"] += 1


def _json_steps(
    trees: Iterable[object], form: LogFormat, left_out: Counter[str]
) -> Iterator[LogStep]:
    for tree in trees:
        entries = _at(tree, form.under) if form.under is not None else [tree]
        for entry in entries if isinstance(entries, list) else []:
            numbers = (_number(_at(entry, key)) for key in (form.record, *form.steps))
            step = next((number for number in numbers if number is not None), None)
            found = ((name, _number(_at(entry, key))) for name, key in form.fields.items())
            values = {name: number for name, number in found if number is not None}
            if step is None or not math.isfinite(step) or not set(form.needs) <= set(values):
                left_out["other entries"] += 1
                continue
            since = values.pop("milliseconds_since_1970", None)
            time = values.pop("time", None if since is None else since / 1000)
            yield LogStep(step=int(step), time=time, values=values)


def _at(tree: object, key: str) -> Any:  # noqa: ANN401  any JSON
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _with_seconds(one: LogStep, before: LogStep | None, size: LogSize) -> LogStep:
    """The step with its values in the units of the record: seconds, tokens, bytes."""
    values = dict(one.values)
    tokens = values.get("tokens") or size.tokens
    samples = values.pop("samples", None) or size.samples
    milliseconds = values.pop("milliseconds", None)
    speeds = (
        (values.get("tokens_per_second"), tokens, 1),
        (values.get("tokens_per_second_per_rank"), tokens, size.ranks),
        (values.get("samples_per_second"), samples, 1),
    )
    if milliseconds is not None:
        values["seconds"] = milliseconds / 1000
    for speed, amount, ranks in speeds:
        if "seconds" not in values and speed and amount and ranks:
            values["seconds"] = amount / (speed * ranks)
    if "seconds" not in values and before is not None and one.time and before.time:
        passed, steps = one.time - before.time, one.step - before.step
        # A stamp of whole seconds tells nothing of shorter steps.
        if passed > 0 and steps > 0 and passed / steps >= 1:
            values["seconds"] = passed / steps
    for name, factor in (("gib", 2**30), ("mib", 2**20), ("bytes", 1)):
        allocated, reserved = values.pop(f"allocated_{name}", None), values.get(f"reserved_{name}")
        if allocated is not None:
            values["memory_bytes"] = allocated * factor
        if reserved is not None:
            del values[f"reserved_{name}"]
            values["reserved_bytes"] = reserved * factor
    if tokens:
        values["tokens"] = tokens
    return LogStep(step=one.step, time=one.time, values=values)


def _without_warm_up(steps: Sequence[LogStep]) -> tuple[LogStep, ...]:
    """Steps of which the first slow ones say `warm_up_seconds` in place of `seconds`."""
    seconds = sorted(each.values["seconds"] for each in steps if "seconds" in each.values)
    if len(seconds) < 3:
        return tuple(steps)
    limit = _WARM_UP_FACTOR * seconds[len(seconds) // 2]
    marked = []
    for index, one in enumerate(steps):
        values = dict(one.values)
        is_slow = values.get("seconds", 0.0) > limit or index == 0
        if is_slow and index < _WARM_UP_STEPS and "seconds" in values:
            values["warm_up_seconds"] = values.pop("seconds")
        marked.append(LogStep(step=one.step, time=one.time, values=values))
    return tuple(marked)


@cache
def _folder() -> Path:
    return Path(str(files("windlass.integrations.imports") / "logs"))
