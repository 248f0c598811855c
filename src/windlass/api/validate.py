"""Validate: tables of published runs beside what is predicted of them."""

from collections.abc import Sequence
from pathlib import Path

from windlass.errors import Faults, WindlassError
from windlass.validation.evaluate import Judged, judge


def judge_tables(paths: Sequence[str]) -> tuple[list[Judged], list[str]]:
    """Predicts every row of these CSV files; no constant is fitted to them.

    Returns:
        The tables that can be read, and what is wrong with the others.
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
    return found, faults
