"""`windlass validate`: compares predictions with runs on this machine, or with published runs."""

from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.api import AsJson
from windlass.cli.commands.validation.validate_here import validate_here
from windlass.cli.commands.validation.validate_tables import print_evaluations
from windlass.cli.console import ProgressBars
from windlass.errors import InputErrors, RequestError, did_you_mean

_DEFAULT_COUNT = 10
"""Plans of each sort, once."""


def validate(
    *what: str,
    count: Annotated[int | None, Parameter(name="--random")] = None,
    seed: int | None = None,
    stack: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with measurements: plans run here, or tables of published runs.

    For example: `windlass validate here --random 40 --seed 1` or `windlass validate *.csv`.

    Args:
        what: `here` (the default) trains a few steps under plans drawn at random, each in a fresh
            process, about half a minute each, or a minute where layers are compiled; what runs is
            named on stderr with its predicted step. A run that was measured is kept, and an
            interrupted validation goes on with the rest. `TABLE.csv ...` predicts the runs of these
            tables.
        count: With `here`: number of plans, one of each sort (10) by default.
        seed: With `here`: which plans are drawn, 0 by default.
        stack: With `here`: what runs the plans, `windlass` (the default) or `torch`, whose plans
            are for two processes.
        as_json: Print the rows as JSON.
    """
    tables = [name for name in what if name != api.HERE]
    if tables and len(tables) < len(what):
        raise RequestError(
            f"`{api.HERE}` cannot be combined with tables; leave out `{tables[0]}` or `{api.HERE}`"
        )
    if tables:
        if (count, seed, stack) != (None, None, None):
            raise RequestError(
                f"`--random`, `--seed` and `--stack` draw plans to run {api.HERE}; "
                "leave them out with tables"
            )
        wrong = [name for name in tables if not name.lower().endswith(".csv")]
        if wrong:
            raise RequestError(
                f"cannot validate `{wrong[0]}`{did_you_mean(wrong[0], [api.HERE])}; write "
                f"`{api.HERE}`, or name CSV files of measured runs"
            )
        with ProgressBars() as progress:
            evaluations, problems = api.evaluate_tables(
                tables, lambda done, count: progress("predicting rows", done, count)
            )
        if evaluations or as_json:
            print_evaluations(evaluations, as_json=as_json)
        if problems:
            raise InputErrors(problems)
        return
    validate_here(
        _DEFAULT_COUNT if count is None else count, seed or 0, stack or "windlass", as_json=as_json
    )
