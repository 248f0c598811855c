"""Options that several commands share, and how a command line becomes one request."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.errors import RequestError
from windlass.schema import Request

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
"""The flag `--json`: print values for other programs instead of tables."""

Flag = Annotated[bool, Parameter(negative="")]
"""A flag without a `--no-` form."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that become part of the request, beside the model, overrides and machine."""

    memory: str | None = None
    """Device memory budget, such as `4GiB`; all of the device's memory if not given."""
    file: Path | None = None
    """A TOML file with a request; overrides and options win over it."""


NO_OPTIONS = RequestOptions()
"""The request as the model and the overrides give it."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(RequestOptions):
    """The same, and a plan in place of a search."""

    plan: Path | None = None
    """The TOML file of a plan (`windlass plan --out`, or a run's `plan.toml`): exactly this plan,
    for its own model and machine unless they are named here too."""


SEARCHED_PLAN = PlanOptions()
"""The request as the model and the overrides give it, and the best plan for it."""


def build_request(
    model: str | None,
    overrides: tuple[str, ...],
    options: RequestOptions,
    *,
    machine: str | None = None,
) -> Request:
    """The request of one command line: *defaults < file < overrides*, options and model last.

    Raises:
        RequestError: the file cannot be read.
        InputErrors: every key and value that is not valid.
    """
    # `windlass train train.steps=10` names no model: the first word is an override too.
    if model is not None and "=" in model:
        overrides, model = (model, *overrides), None
    return api.make_request(
        model, *overrides, machine=machine, memory=options.memory, file=options.file
    )


def build_plan(
    model: str | None,
    overrides: tuple[str, ...],
    options: PlanOptions,
    *,
    machine: str | None = None,
    progress: api.Progress,
) -> api.Planned:
    """The plan of one command line: chosen for the request, or the one of `--plan`.

    Raises:
        WindlassError: what is wrong with the request, the model, the machine or the plan.
    """
    request = build_request(model, overrides, options, machine=machine)
    return api.plan(request, plan=options.plan, progress=progress)


def split_overrides(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names, and the `key=value` overrides that an option which takes many names swallowed too."""
    names = tuple(word for word in words if "=" not in word)
    return names, tuple(word for word in words if "=" in word)


def require_machine_names(machines: tuple[str, ...]) -> None:
    """Refuses an option `--on` without a value.

    Raises:
        RequestError: `machines` is empty.
    """
    if not machines:
        raise RequestError("`--on` names no machine; `windlass machines` lists them")
