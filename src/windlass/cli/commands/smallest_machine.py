"""`windlass smallest-machine`: how many devices, and which parallelism, each model needs."""

import json
from pathlib import Path

from windlass import api
from windlass.cli.command_options import require_machine_names, split_overrides
from windlass.cli.console import ProgressBars, console, print_json, print_notes, print_written
from windlass.cli.flags import AsJson, Flag, ManyNames
from windlass.report import smallest_machine_figure, smallest_machine_table

MODELS = ("gpt2-1.5b", "gpt-j-6b", "gpt3-13b", "gpt-neox-20b", "gpt3-175b", "megatron-1t")
"""Models, if none is named."""

FAMILIES = ("dgx-a100-80gb", "dgx-h100", "ipu-m2000", "cs-2")
"""Families of machines, if `--on` is not given."""


def smallest_machine(
    *words: str,
    on: ManyNames = FAMILIES,
    stack: str | None = None,
    in_memory: Flag = False,
    in_phases: Flag = False,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest machine of each family that can train each model.

    For example: `windlass smallest-machine gpt3-175b --on dgx-h100 train.batch=1536`.

    Args:
        words: Names of models, and `key=value` for all of them, such as `train.batch=256`; without
            a name, a range of well-known models.
        on: Families of machines (`windlass machines` lists them), or single machines.
        stack: Software to plan for (`windlass stacks` lists them); Windlass's own runtime if not
            given.
        in_memory: Keep all layers and their training state in device memory; by default layers may
            take turns there, and state may be offloaded.
        in_phases: The default now.
        picture: Draw the result to this `.svg` or `.png` file.
        as_json: Print the result as JSON.
    """
    if picture is not None:
        api.require_drawable(picture, pages=False)
    families, more = split_overrides(on)
    require_machine_names(families)
    models, overrides = split_overrides((*words, *more))
    if in_phases and not in_memory:
        print_notes(["`--in-phases` is the default now; `--in-memory` keeps all in device memory"])
    if stack is not None:
        overrides = (*overrides, f"stack={json.dumps(stack)}")
    with ProgressBars() as progress:
        results = tuple(
            api.smallest_machines(
                models or MODELS,
                families,
                overrides=overrides,
                in_memory=in_memory,
                progress=progress,
            )
        )
    if picture is not None:
        mode = "layers and state stay in memory" if in_memory else "layers may take turns in memory"
        caption = ", ".join((f"Predicted: {mode}", *overrides))
        api.draw_figure(smallest_machine_figure(results, caption), picture)
    print_written(picture)
    if as_json:
        print_json(results)
        return
    console.print(smallest_machine_table(results))
