"""Whether a model fits, and how far predictions are from published runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import InputErrors, WindlassError
from windlass.jobs import Planned, Progress, plan
from windlass.planner import explain_result
from windlass.schema import (
    MemoryClass,
    Request,
    fact_table_html,
)
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.validation import TableEvaluation


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit:
    """Whether training a model fits; true in a condition if it does."""

    fits: bool
    verdict: str
    """The same in a sentence, with its numbers."""
    by_class: Mapping[MemoryClass, int]
    """Predicted bytes of each class of memory, at the fullest moment of the fullest device."""
    help: tuple[str, ...]
    """What would help, cheapest first; empty if it fits."""
    planned: Planned

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        return f"<Fit: {self.planned.graph.name} {self.verdict}>"

    def _repr_html_(self) -> str:
        facts: dict[str, str] = {}
        facts |= {name: format_bytes(nbytes) for name, nbytes in self.by_class.items()}
        facts |= {f"help {i}": text for i, text in enumerate(self.help, start=1)}
        return fact_table_html(f"{self.planned.graph.name} {self.verdict}", facts)


def fit(
    what: Planned | Request | str | None = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Whether training a model fits, memory class by class, and if not, what would help.

    Args:
        what: a model's name, a request, or the result of `plan`.
        overrides: `key=value`, if `what` is a name.
        machine: a name of the catalogue; None means this machine.
        memory: device memory budget, such as `4GiB`; None means all of it.
        progress: called with how far planning is.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    planned = (
        what
        if isinstance(what, Planned)
        else plan(what, *overrides, machine=machine, memory=memory, progress=progress)
    )
    result, explanation = planned.result, explain_result(planned.result)
    return Fit(
        fits=result.fits,
        verdict=explanation.verdict,
        by_class=result.advice.by_class if result.advice else planned.prediction.peaks[0].by_class,
        help=explanation.help,
        planned=planned,
    )


def validate(*tables: str | Path) -> tuple["TableEvaluation", ...]:
    """How far predictions are from the published runs in some CSV tables.

    Args:
        tables: CSV files of measured runs.

    Raises:
        InputErrors: all that is wrong with the tables.
    """
    evaluations, problems = evaluate_tables(tables)
    if problems:
        raise InputErrors(problems)
    return tuple(evaluations)


def evaluate_tables(
    paths: Sequence[str | Path], progress: Callable[[int, int], None] | None = None
) -> tuple[list["TableEvaluation"], list[str]]:
    """Predicts every row of some CSV files; no constant is fitted to them.

    Args:
        paths: the files.
        progress: called with the numbers of rows of a file that are done and that there are.

    Returns:
        The tables that can be read, and a message for each other one.
    """
    from windlass.validation import evaluate_table

    evaluations: list[TableEvaluation] = []
    problems: list[str] = []
    for path in paths:
        try:
            evaluations.append(evaluate_table(Path(path), progress))
        except InputErrors as error:
            problems += error.messages
        except WindlassError as error:
            problems.append(str(error))
    return evaluations, problems
