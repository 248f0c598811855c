"""Options that several commands share, and how a command line becomes one request."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass.document import Document, format_value, leaf_fields
from windlass.errors import RequestError
from windlass.flags import Flag, Word
from windlass.jobs.known_machines import Progress
from windlass.jobs.planned import Planned, make_request, plan, request_origins
from windlass.schema import Plan, Request

_NOT_PLANNED = ("model", "sparsity", "lora", "machine", "stack", "memory", "data", "train")
"""Keys and tables that no planner decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigin:
    """One key of a request with the value that is used."""

    key: str
    """Such as `train.batch`."""
    value: str
    """As it can be given."""
    origin: str
    """`default`, a default for model and machine with its reason, `FILE:LINE`, the override, or
    `planner`."""


def value_origins(planned: Planned, given: Mapping[str, str]) -> tuple[ValueOrigin, ...]:
    """Every key that has a value, and where it comes from.

    Args:
        planned: a request with its plan.
        given: where each key that was given comes from, as `Request.origins` returns it.

    Returns:
        The keys in the order of the request; those that the model decides are left out.
    """
    return tuple(_origins(planned, given))


def _origins(planned: Planned, given: Mapping[str, str]) -> Iterator[ValueOrigin]:
    reasons = {default.key: f"default: {default.reason}" for default in planned.defaults}
    plan = planned.result.plan
    for key, _ in leaf_fields(Request):
        value = _value(planned.request, key)
        origin = given.get(key) or reasons.get(key) or "default"
        if value is None and plan is not None and key.partition(".")[0] not in _NOT_PLANNED:
            value, origin = _planned_value(plan, key), "planner"
        if value is not None:
            yield ValueOrigin(key=key, value=format_value(value), origin=origin)


def _planned_value(plan: Plan, key: str) -> object:
    if key == "phases":
        return plan.phase_count
    return None if key == "recompute_layers" else _value(plan, key)


def _value(document: Document, key: str) -> object:
    value: object = document
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


Model = Annotated[str | Request | Planned | None, Word]
"""What is planned: a model's name, or from Python a whole request, or a plan that there is."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that become part of the request, beside the model, overrides and machine."""

    memory: str | None = None
    """Device memory budget, such as `4GiB`; all of the device's memory if not given."""
    stack: str | None = None
    """Software whose run is planned and predicted (`windlass stacks` lists them), or a `.toml` file
    of your own; for `plan` also `all`, a table over the engines of others. If not given, Windlass's
    own runtime, or `torch` where `train` and `launch` run a plan for several GPUs."""
    margin: str | None = None
    """What a chosen plan bears, `5%` if not given: so much device memory stays free, and links so
    much slower do not favour another plan; 0 chooses the proved fastest plan."""
    file: Path | None = None
    """A TOML file with a request; overrides and options win over it."""

    def overrides(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        """The overrides of a command line, and the margin as one of them."""
        margin = () if self.margin is None else (f"margin={json.dumps(self.margin)}",)
        return (*overrides, *margin)


NO_OPTIONS = RequestOptions()
"""The request as the model and the overrides give it."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(RequestOptions):
    """The same, and a plan in place of a search."""

    plan: Path | None = None
    """The TOML file of a plan (`windlass plan --out`, or a run's `plan.toml`): exactly this plan,
    for its own model and machine unless they are named here too."""
    no_cache: Flag = False
    """Search anew, also if the outcome of the same question was kept."""


SEARCHED_PLAN = PlanOptions()
"""The request as the model and the overrides give it, and the best plan for it."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlanOptions(PlanOptions):
    """The same, and whether to explain every value, for commands that show them."""

    why: Flag = False
    """Also show what the plan is made of, and every value with where it comes from: file and line,
    override, default or planner."""


EXPLAINED_PLAN = ExplainedPlanOptions()
"""The best plan for the request, without an explanation of every value."""


def build_request(
    model: Model,
    overrides: tuple[str, ...],
    options: RequestOptions,
    *,
    machine: str | None = None,
) -> Request:
    """The request of one command line: *defaults < file < overrides*, options and model last.

    Raises:
        RequestError: the file cannot be read, or a whole request has overrides or options.
        InputErrors: every key and value that is not valid.
    """
    model = model.request if isinstance(model, Planned) else model
    if isinstance(model, Request):
        if overrides or machine is not None or options != type(options)():
            raise RequestError("a whole request takes no overrides; give them to `make_request`")
        return model
    model, overrides = split_model(model, overrides)
    return make_request(
        model,
        *options.overrides(overrides),
        machine=machine,
        memory=options.memory,
        stack=options.stack,
        file=options.file,
    )


def explain_values(
    planned: Planned,
    model: str | None,
    overrides: tuple[str, ...],
    options: ExplainedPlanOptions,
    *,
    machine: str | None = None,
) -> tuple[ValueOrigin, ...]:
    """Every value of a planned command line with where it comes from; nothing without `--why`.

    Raises:
        RequestError: the request file cannot be read any more.
    """
    if not options.why:
        return ()
    model, overrides = split_model(model, overrides)
    given = request_origins(
        model,
        *options.overrides(overrides),
        machine=machine,
        memory=options.memory,
        stack=options.stack,
        file=options.file,
    )
    return value_origins(planned, given)


def split_model(
    model: str | None, overrides: tuple[str, ...]
) -> tuple[str | None, tuple[str, ...]]:
    """Model and overrides: `windlass train train.steps=10` names no model in its first word."""
    return (None, (model, *overrides)) if model is not None and "=" in model else (model, overrides)


def build_plan(
    model: Model,
    overrides: tuple[str, ...],
    options: PlanOptions,
    *,
    machine: str | None = None,
    progress: Progress | None,
) -> Planned:
    """The plan of one command line: chosen for the request, or the one of `--plan`.

    Raises:
        WindlassError: what is wrong with the request, the model, the machine or the plan.
    """
    if isinstance(model, Planned):
        return model
    request = build_request(model, overrides, options, machine=machine)
    return plan(request, plan=options.plan, cache=not options.no_cache, progress=progress)


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
