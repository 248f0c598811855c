"""Options that several commands share, and how a command line becomes one request."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass.api.fine_tuning.peft_adapters import base_of_adapters
from windlass.api.flags import Flag, Word
from windlass.api.machines import Progress
from windlass.api.plan import Planned, make_request, plan, request_origins
from windlass.api.training.parent import ParentRun, find_parent, request_of_child
from windlass.api.value_origins import ValueOrigin, value_origins
from windlass.errors import RequestError
from windlass.models import is_peft_folder
from windlass.schema import REQUEST_FILE, Request

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
    of your own; Windlass's own runtime if not given."""
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


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ParentOptions:
    """Which run a new one starts from, and how."""

    parent: Annotated[str | None, Parameter(name="--from")] = None
    """Start from the newest checkpoint of this run, or from another one by `RUN@STEP`, with the
    run's request; steps, learning rates and data order are the new run's own. Or start from the
    adapters of a PEFT folder, beside the base that it names."""
    continues: Annotated[Flag, Parameter(name="--continue")] = False
    """With `--from`: go on with the steps, the learning rates and the data order of that run, up to
    a larger `train.steps`."""

    @property
    def adapter(self) -> Path | None:
        """The PEFT folder that `--from` names; None if it names a run, or nothing."""
        if self.parent is None or not is_peft_folder(Path(self.parent)):
            return None
        return Path(self.parent)

    def find(self, root: Path) -> ParentRun | None:
        """The run to start from; None starts from the beginning, or from adapters of PEFT.

        Raises:
            RequestError: `--continue` without `--from`.
            WindlassError: no such run or checkpoint.
        """
        if self.adapter is not None and self.continues:
            raise RequestError("`--continue` goes on with a run, and `--from` names a PEFT folder")
        if self.parent is not None and self.adapter is None:
            return find_parent(self.parent, root=root, continues=self.continues)
        if self.continues:
            raise RequestError("`--continue` goes on with a run; name it by `--from RUN`")
        return None


NO_PARENT = ParentOptions()
"""A run that starts from the beginning."""


def request_of_parent(options: ExplainedPlanOptions, parent: ParentRun) -> ExplainedPlanOptions:
    """The options with the request of a parent run as their file.

    Raises:
        RequestError: they name another file.
    """
    if options.file is not None:
        raise RequestError(
            f"`--file {options.file}` with `--from`, which takes the request of its run; give the "
            "changes as `key=value`"
        )
    return replace(options, file=parent.record.folder / REQUEST_FILE)


def beside_adapters(
    model: str | None, overrides: tuple[str, ...], folder: Path
) -> tuple[str, tuple[str, ...]]:
    """The model and the overrides of a run that starts from adapters of PEFT.

    Raises:
        ModelError: no model is named, and the folder's base is none of this machine.
    """
    model, overrides = _split_model(model, overrides)
    return model or base_of_adapters(folder), (*overrides, f"lora.adapter={folder}")


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
    model, overrides = _split_model(model, overrides)
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
    model, overrides = _split_model(model, overrides)
    given = request_origins(
        model,
        *options.overrides(overrides),
        machine=machine,
        memory=options.memory,
        stack=options.stack,
        file=options.file,
    )
    return value_origins(planned, given)


def _split_model(
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
    parent: ParentRun | None = None,
    progress: Progress | None,
) -> Planned:
    """The plan of one command line: chosen for the request, or the one of `--plan`.

    A run with a parent has the parent's request as its file.

    Raises:
        WindlassError: what is wrong with the request, the model, the machine or the plan.
    """
    if isinstance(model, Planned):
        return model
    request, fine_tunes = build_request(model, overrides, options, machine=machine), False
    if parent is not None:
        name = model if isinstance(model, str) else None
        given = request_origins(None, *_split_model(name, overrides)[1])
        request, fine_tunes = request_of_child(request, parent, given)
    return plan(
        request,
        plan=options.plan,
        fine_tunes=fine_tunes,
        cache=not options.no_cache,
        progress=progress,
    )


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
