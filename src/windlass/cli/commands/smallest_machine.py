"""`windlass needed`: how many devices, and which parallelism, each model needs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from windlass import api
from windlass.cli.console import Bars, console, print_json
from windlass.cli.options import AsJson, apart, require_named
from windlass.report.figures.smallest_machine import needs_picture, needs_table

MODELS = ("gpt2-1.5b", "gpt-j-6b", "gpt3-13b", "gpt-neox-20b", "gpt3-175b", "megatron-1t")
FAMILIES = ("dgx-a100-80gb", "dgx-h100", "ipu-m2000", "cs-2")


def needed(
    *words: str,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = FAMILIES,
    in_phases: bool = False,
    picture: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest machine of each family that each model can be trained on.

    Args:
        words: names of models, and `key=value` for all of them, such as `train.batch=256`; without
            a name a range of known models.
        on: families of machines (`windlass machines` lists them), or single machines.
        in_phases: let layers take turns in memory, and state live in tiers beyond; else all stay
            in memory.
        picture: draw the answer to this `.svg` or `.png` file.
        as_json: print the answer as JSON.
    """
    if picture is not None:
        api.require_drawable(picture, pages=False)
    families, more = apart(on)
    require_named(families)
    models, overrides = apart((*words, *more))
    with Bars() as progress:
        found = tuple(
            api.needed(
                models or MODELS,
                families,
                overrides=overrides,
                whole=not in_phases,
                progress=progress,
            )
        )
    if picture is not None:
        asked = (
            "layers and state stay in memory"
            if not in_phases
            else "layers may take turns in memory"
        )
        line = ", ".join((f"Predicted: {asked}", *overrides))
        api.draw_alone(needs_picture(found, line), picture)
    if as_json:
        print_json(found)
        return
    console.print(needs_table(found))
