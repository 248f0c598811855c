"""Validate: tables of published runs beside what is predicted of them."""

from collections.abc import Sequence
from pathlib import Path

from windlass.errors import Faults, RequestError, WindlassError
from windlass.published.judge import Judged, judge


def judge_tables(paths: Sequence[str]) -> list[Judged]:
    """Predicts every row of these CSV files; no constant is fitted to them.

    Raises:
        RequestError: one of them cannot be read as a table of runs.
        Faults: what is wrong in all of them.
    """
    found: list[Judged] = []
    faults: list[str] = []
    for path in paths:
        try:
            found.append(judge(Path(path)))
        except Faults as error:
            faults += error.faults
        except WindlassError as error:
            faults.append(str(error))
    if len(faults) == 1:
        raise RequestError(faults[0])
    if faults:
        raise Faults(faults)
    return found
