"""Options by which a run starts from another one, or from adapters of PEFT."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass.errors import RequestError
from windlass.flags import Flag
from windlass.jobs import (
    ExplainedPlanOptions,
    Planned,
    Progress,
    base_of_adapters,
    build_request,
    plan,
    request_origins,
    split_model,
)
from windlass.models import is_peft_folder
from windlass.schema import REQUEST_FILE
from windlass.training.parent import ParentRun, find_parent, request_of_child


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
    model, overrides = split_model(model, overrides)
    return model or base_of_adapters(folder), (*overrides, f"lora.adapter={folder}")


def plan_of_child(
    model: str | None,
    overrides: tuple[str, ...],
    options: ExplainedPlanOptions,
    parent: ParentRun,
    *,
    machine: str | None,
    progress: Progress,
) -> Planned:
    """The plan of a run that starts from another one, whose request it has as its file.

    Raises:
        WindlassError: what is wrong with the request, the model, the machine or the plan.
    """
    request = build_request(model, overrides, options, machine=machine)
    given = request_origins(None, *split_model(model, overrides)[1])
    request, fine_tunes = request_of_child(request, parent, given)
    return plan(
        request,
        plan=options.plan,
        fine_tunes=fine_tunes,
        cache=not options.no_cache,
        progress=progress,
    )
