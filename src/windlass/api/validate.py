"""Validate: tables of published runs beside what is predicted of them."""

from collections.abc import Sequence
from pathlib import Path

from windlass.errors import InputErrors, WindlassError
from windlass.validation.evaluate_table import TableEvaluation, evaluate_table


def judge_tables(paths: Sequence[str]) -> tuple[list[TableEvaluation], list[str]]:
    """Predicts every row of these CSV files; no constant is fitted to them.

    Returns:
        The tables that can be read, and what is wrong with the others.
    """
    found: list[TableEvaluation] = []
    faults: list[str] = []
    for path in paths:
        try:
            found.append(evaluate_table(Path(path)))
        except InputErrors as error:
            faults += error.faults
        except WindlassError as error:
            faults.append(str(error))
    return found, faults
