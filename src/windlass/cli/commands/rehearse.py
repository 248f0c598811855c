"""`windlass rehearse`: runs and verifies a downscaled large plan on local processes."""

from pathlib import Path

from windlass import api
from windlass.cli.command_options import NO_OPTIONS, AsJson, RequestOptions, build_request
from windlass.cli.console import ProgressBars
from windlass.cli.verification_output import VERIFICATION_STEPS, verify_and_print


def rehearse(
    model: str | None = None,
    *overrides: str,
    on: str | None = None,
    plan: Path | None = None,
    options: RequestOptions = NO_OPTIONS,
    faults: bool = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a large machine downscaled, on local processes, and verify it as `check` does.

    Pipeline stages, tensor-parallel ranks, replicas, shards, phases, the schedule and recompute
    are kept; widths become tiny, and degrees are divided until 8 processes are enough. All
    communication is real. A plan that does not fit the machine is rehearsed too, with a note.

    For example: `windlass rehearse gpt3-175b --on dgx-h100:16 parallel.pipeline=8`.

    Args:
        model: A name (`windlass models` lists them).
        overrides: `key=value`, such as `parallel.pipeline=8` or `sharding.parameters=4`.
        on: The machine that the plan is for; `here` if not given.
        plan: The TOML file of a plan, instead of one that is chosen.
        options: Device memory budget and request file.
        faults: Also inject faults, and check that each is detected.
        as_json: Print the comparison as JSON.
    """
    with ProgressBars() as progress:
        request = build_request(model, overrides, options, machine=on)
        full_plan, misfit = (
            api.rehearsal(request, progress=progress) if plan is None else (api.load_plan(plan), ())
        )
        train = request.train.model_copy(update={"steps": VERIFICATION_STEPS})
        request = request.model_copy(update={"train": train})
        small, changes = api.downscale_plan(full_plan, request, progress=progress)
        verify_and_print(small, (*misfit, *changes), progress, faults=faults, as_json=as_json)
