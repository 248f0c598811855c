"""What is wrong with the record of a run, one sentence for each fault."""

import contextlib
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.atomic_files import hash_file
from windlass.schema import (
    ATTEMPTS_FOLDER,
    CODE_FILE,
    ENVIRONMENT_FILE,
    PLAN_FILE,
    REQUEST_FILE,
)
from windlass.tracking.environment import host_mark
from windlass.tracking.folder_lock import ID_FILE
from windlass.tracking.journal import JournalEvent
from windlass.tracking.run_folder import JournalFile

_SHOWN_DIGITS, _SHOWN_RANGES = 12, 4
_MOST_BYTES = 2**28
_MAX_STEPS = 10**8
"""A journal that says that it has more is not counted step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file of a run folder whose content is not what the run wrote."""

    actual: str
    """SHA-256 of what it contains now."""
    recorded: str
    """SHA-256 of what the run wrote, from its journal."""

    def __str__(self) -> str:
        actual, recorded = self.actual[:_SHOWN_DIGITS], self.recorded[:_SHOWN_DIGITS]
        return f"its fingerprint is `{actual}`, and the run recorded `{recorded}`"


def journal_faults(
    run_id: str,
    files: Sequence[JournalFile],
    events: Sequence[JournalEvent],
    steps: Sequence[int],
    changed: Mapping[str, ChangedFile],
) -> Iterator[str]:
    """The faults of a run whose journals were read, a sentence each.

    Args:
        steps: numbers of the steps that they hold, in order, each once.
    """
    attempts = Counter(file.attempt for file in files)
    for attempt in sorted(set(range(1, max(attempts, default=0))) - attempts.keys()):
        yield f"the journal of attempt {attempt} is missing"
    for attempt, count in sorted(attempts.items()):
        if count > 1:
            yield (
                f"the run went on at {count} sites: attempt {attempt} exists {count} times, and "
                "the steps of the last one are shown"
            )
    yield from _lost_steps(events, steps)
    metas = (event.fields for event in events if event.name == "meta")
    if next((meta["id"] for meta in metas if "id" in meta), run_id) != run_id:
        yield f"{ID_FILE}: has changed; it is `{run_id}`, and the run recorded another"
    yield from (f"{name}: has changed; {how}" for name, how in changed.items())


def changed_files(folder: Path, events: Sequence[JournalEvent]) -> dict[str, ChangedFile]:
    """The sealed files whose content is another one now; a missing file is no changed one."""
    seals: dict[str, object] = {}
    for event in events:
        files = event.fields.get("files")
        if event.name == "seal" and isinstance(files, Mapping):
            seals |= files
    changed: dict[str, ChangedFile] = {}
    for name, recorded in seals.items():
        # A journal from elsewhere may name anything: only files of the folder itself are read.
        if Path(name).name == name:
            with contextlib.suppress(OSError, ValueError):
                size = (folder / name).stat().st_size
                # What is too large to be read is none of what a run wrote.
                actual = hash_file(folder / name) if size <= _MOST_BYTES else "too large"
                if actual != recorded:
                    changed[name] = ChangedFile(actual=actual, recorded=str(recorded))
    return changed


def is_from_this_host(folder: Path, run_id: str, events: Sequence[JournalEvent]) -> bool:
    """Whether what a run's files make a command run was written by this user on this machine.

    Anybody can write a name of a host into a record, and nobody else can mark the seal of a file.
    """
    own: set[tuple[str, str]] = set()
    for event in events:
        files, mark = event.fields.get("files"), event.fields.get("host")
        if event.name == "seal" and isinstance(files, Mapping) and isinstance(mark, str):
            hashes = {str(name): str(digest) for name, digest in files.items()}
            expected = host_mark(run_id, hashes)
            if expected is not None and hmac.compare_digest(mark.encode(), expected.encode()):
                own |= hashes.items()
    try:
        return all(
            (name, hash_file(folder / name)) in own
            for name in (REQUEST_FILE, PLAN_FILE, ENVIRONMENT_FILE, CODE_FILE)
            if (folder / name).exists()
        )
    except OSError:
        return False


def describe_skipped(path: Path, skipped: Sequence[range]) -> str:
    """One sentence on the bytes of a journal that belong to no whole record."""
    parts = [f"{part.start} to {part.stop - 1}" for part in skipped[:_SHOWN_RANGES]]
    if len(skipped) > _SHOWN_RANGES:
        parts.append(f"{len(skipped) - _SHOWN_RANGES} more ranges")
    return (
        f"{path.parent.name}/{path.name}: {sum(map(len, skipped))} bytes are torn or damaged "
        f"and were skipped (bytes {', '.join(parts)})"
    )


def first_attempt_of_plan(folder: Path) -> int:
    """The first attempt that ran under the current plan."""
    with contextlib.suppress(OSError):
        # An attempt's folder holds what later ones have replaced, which may be its code alone.
        earlier = [path.parent.name for path in (folder / ATTEMPTS_FOLDER).glob(f"*/{PLAN_FILE}")]
        return 1 + max((int(name) for name in earlier if name.isdecimal()), default=0)
    return 1


def _lost_steps(events: Sequence[JournalEvent], steps: Sequence[int]) -> Iterator[str]:
    """The steps that no journal holds any more."""
    metas = [event.fields for event in events if event.name == "meta"]
    if any("origin" in meta for meta in metas):
        return  # a loop that is not Windlass's own logs the steps that it likes
    noted = [step for event in events if isinstance(step := event.fields.get("step"), int)]
    last = max((*noted, *steps[-1:]), default=0)
    # A run that continues another one begins with a later step than the first.
    first = min(steps[:1], default=1) if any("parent" in meta for meta in metas) else 1
    if last - first + 1 == len(steps) or last - first > _MAX_STEPS:
        return
    present = set(steps)
    lost = [number for number in range(first, last + 1) if number not in present]
    if lost:
        yield (
            f"the record lacks {_step_ranges(lost)}; only the measurements are lost, not the "
            "training that they did"
        )


def _step_ranges(numbers: Sequence[int]) -> str:
    """`step 3`, or `steps 3 to 5 and 9`."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    parts = [
        str(start) if start == end else f"{start} to {end}"
        for start, end in zip(starts, ends, strict=True)
    ]
    more = len(parts) - _SHOWN_RANGES
    shown = parts if more <= 0 else [*parts[:_SHOWN_RANGES], f"{more} more ranges"]
    *rest, last = shown
    listed = f"{', '.join(rest)} and {last}" if rest else last
    return f"step{'s' if len(numbers) > 1 else ''} {listed}"
