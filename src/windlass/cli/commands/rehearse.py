"""`windlass rehearse`: a plan for a large machine, run and proved in small on local processes."""

from pathlib import Path

from windlass import api
from windlass.cli.console import ProgressBars
from windlass.cli.options import AsJson, build_request
from windlass.cli.verification_output import VERIFICATION_STEPS, verify_and_print


def rehearse(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    plan: Path | None = None,
    memory: str | None = None,
    file: Path | None = None,
    faults: bool = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a large machine in small, on local processes, and prove it as `check` does.

    Stages, slices, replicas, shards, phases, order and recompute are kept; widths become tiny, and
    degrees are divided until 8 processes are enough. All exchanges are real ones. A cut that does
    not fit the machine is rehearsed too, and that is said.

    Args:
        model: a name (`windlass models` lists them).
        overrides: `key=value`, such as `parallel.pipeline=8` or `sharding.parameters=4`.
        on: the machine that the plan is for; `here` if not given.
        plan: the TOML file of a plan, in place of one that is chosen.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        faults: make mistakes on purpose too, and see that each is found.
        as_json: print what was compared as JSON.
    """
    with ProgressBars() as progress:
        request = build_request(model, overrides, on=on, memory=memory, file=file)
        chosen, room = (
            api.rehearsal(request, progress=progress) if plan is None else (api.load_plan(plan), ())
        )
        steps = request.train.model_copy(update={"steps": VERIFICATION_STEPS})
        short = request.model_copy(update={"train": steps})
        small, notes = api.downscale_plan(chosen, short, progress=progress)
        verify_and_print(small, (*room, *notes), progress, faults=faults, as_json=as_json)
