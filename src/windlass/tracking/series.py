"""Series: the numbers of one name over the steps of a run, as arrays."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from windlass.errors import RecordError
from windlass.tracking.journal import SYSTEM_PREFIX
from windlass.tracking.journal_reader import JournalCursor, JournalRecords, PackedRows
from windlass.tracking.run_folder import journal_files

SeriesValues = npt.NDArray[np.float64]
"""`Float[row]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """The numbers of one name, in the order in which they were written."""

    steps: npt.NDArray[np.int64]
    """`Int[row]`; of a measurement of the host the last step that was done."""
    times: SeriesValues
    """Seconds since 1970 on the writer's clock, which may jump."""
    values: SeriesValues

    def __len__(self) -> int:
        return len(self.steps)

    def before(self, step: int) -> "Series":
        """The rows of earlier steps."""
        kept = self.steps < step
        return Series(steps=self.steps[kept], times=self.times[kept], values=self.values[kept])


def read_series(folder: Path, rank: int = 0) -> dict[str, Series]:
    """All series of one rank of a run by name, such as `loss` and `seconds.forward`.

    As in `RunRecord.steps`, a later attempt replaces the steps of earlier ones from its own first
    step on. Measurements of the host (`sys.cpu`) are those of all attempts, one after another.

    Args:
        rank: the rank, of those in `journal_ranks`; one that has no journal has no series.
    """
    series: dict[str, Series] = {}
    for path in (file.path for file in journal_files(folder) if file.rank == rank):
        with contextlib.suppress(RecordError):
            series = continued(series, series_of(JournalCursor(path).read()))
    return series


def journal_ranks(folder: Path) -> tuple[int, ...]:
    """The ranks of a run that have written a journal, in order."""
    return tuple(sorted({file.rank for file in journal_files(folder)}))


def series_of(records: JournalRecords) -> dict[str, Series]:
    """The series of one journal, or of a part of it, by name."""
    groups: dict[str, list[PackedRows]] = {}
    for rows in records.rows:
        for name in rows.names:
            groups.setdefault(name, []).append(rows)
    # Names mostly come in the same rows, and then share their steps and times.
    tables: dict[tuple[int, ...], _Tables] = {}
    series: dict[str, Series] = {}
    for name, rows_of_name in groups.items():
        key = tuple(map(id, rows_of_name))
        if key not in tables:
            tables[key] = _Tables(rows_of_name)
        series[name] = tables[key].series(name)
    return series


def continued(earlier: Mapping[str, Series], later: Mapping[str, Series]) -> dict[str, Series]:
    """The series of several attempts, of which the later replaces what it does again."""
    starts = [int(series.steps[0]) for name, series in later.items() if not _is_system(name)]
    series = dict(earlier)
    if starts:
        first = min(starts)
        series = {
            name: item if _is_system(name) else item.before(first) for name, item in earlier.items()
        }
    for name, item in later.items():
        series[name] = _concatenated([series[name], item]) if name in series else item
    return {name: item for name, item in series.items() if len(item)}


def main_series(series: Mapping[str, Series]) -> str | None:
    """`loss`; of a run that logs none the first name that it logs; None if it logs nothing."""
    own = (name for name in series if not _is_system(name))
    return "loss" if "loss" in series else next(own, None)


def _is_system(name: str) -> bool:
    return name.startswith(SYSTEM_PREFIX)


def _concatenated(parts: Sequence[Series]) -> Series:
    return Series(
        steps=np.concatenate([part.steps for part in parts]),
        times=np.concatenate([part.times for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )


class _Tables:
    """The rows of all groups that have some names, in the order of the file."""

    def __init__(self, groups: Sequence[PackedRows]) -> None:
        self._groups = groups
        self._tables = [_table(rows) for rows in groups]
        offsets = np.concatenate([rows.offsets for rows in groups])
        self._order = np.argsort(offsets, kind="stable")
        self._steps = self._in_order([table[0] for table in self._tables]).view(np.int64)
        self._times = self._in_order([table[1] for table in self._tables])

    def series(self, name: str) -> Series:
        """The series of one of the names."""
        values = [
            table[2 + rows.names.index(name)]
            for rows, table in zip(self._groups, self._tables, strict=True)
        ]
        return Series(steps=self._steps, times=self._times, values=self._in_order(values))

    def _in_order(self, parts: Sequence[SeriesValues]) -> SeriesValues:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)[self._order]


def _table(rows: PackedRows) -> SeriesValues:
    """Steps, as the bits of integers, times and the values of each name, `Float[2 + name, row]`."""
    flat = np.frombuffer(b"".join(rows.payloads), dtype="<f8")
    return np.ascontiguousarray(flat.reshape(len(rows.payloads), -1).T, dtype=np.float64)
