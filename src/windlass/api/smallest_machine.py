"""Finds the smallest machine of a family that can train a model, by planning on each size."""

import json
from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from windlass.answer import Answers
from windlass.errors import InputErrors, PlanError
from windlass.flags import Flag, ManyNames, Watch, Written
from windlass.hardware import HostFamily, host_families, load_machine
from windlass.jobs import (
    NO_OBJECTS,
    Planned,
    Progress,
    capture,
    draw_figure,
    make_request,
    plan_request,
    require_drawable,
    require_machine_names,
    split_overrides,
)
from windlass.report import smallest_machine_figure, smallest_machine_table
from windlass.schema import Machine, SmallestMachine

_MODELS = ("gpt2-1.5b", "gpt-j-6b", "gpt3-13b", "gpt-neox-20b", "gpt3-175b", "megatron-1t")
"""Models, if none is named."""

_STATE_BYTES = 16
"""Bytes of training state per parameter: bfloat16 weight and gradient, float32 master and two
moments, 2 + 2 + 4 + 8. At best they are sharded over all devices, but must lie somewhere."""


class SmallestMachines(Answers[SmallestMachine]):
    """The smallest machine of each family for each model."""

    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[RenderableType]:
        """One row for each model and family."""
        yield smallest_machine_table(self)


def smallest_machines(
    *words: str,
    on: ManyNames = ("dgx-a100-80gb", "dgx-h100", "ipu-m2000", "cs-2"),
    stack: str | None = None,
    in_memory: Flag = False,
    in_phases: Flag = False,
    picture: Written = None,
    progress: Watch = None,
) -> SmallestMachines:
    """Find the smallest machine of each family that can train each model.

    Machines whose memory is too small for the training state alone are skipped. The others are
    planned for, smallest first, until a plan fits.

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
        progress: Called with the machine that is being planned for.

    Raises:
        WindlassError: what is wrong with a request, a model or a family.
    """
    if picture is not None:
        require_drawable(picture, pages=False)
    families, more = split_overrides(on)
    require_machine_names(families)
    models, overrides = split_overrides((*words, *more))
    if stack is not None:
        overrides = (*overrides, f"stack={json.dumps(stack)}")
    results = SmallestMachines(
        _smallest_machines(models or _MODELS, families, overrides, in_memory, progress)
    )
    if in_phases and not in_memory:
        results.notes = (
            "`--in-phases` is the default now; `--in-memory` keeps all in device memory",
        )
    if picture is not None:
        mode = "layers and state stay in memory" if in_memory else "layers may take turns in memory"
        caption = ", ".join((f"Predicted: {mode}", *overrides))
        draw_figure(smallest_machine_figure(results, caption), picture)
    return results


def _smallest_machines(
    models: Sequence[str],
    families: Sequence[str],
    overrides: Sequence[str],
    in_memory: bool,
    progress: Progress | None,
) -> Iterator[SmallestMachine]:
    sizes = {name: _machine_sizes(name) for name in families}
    overrides = (*(("offload.optimizer=device",) if in_memory else ()), *overrides)
    for model in models:
        parameters = capture(make_request(model, *overrides).model_identity).parameter_count
        for family, machines in sizes.items():
            candidates = [
                machine.name
                for machine in machines
                if _capacity_bytes(machine, in_memory=in_memory) >= _STATE_BYTES * parameters
            ]
            tried, reason = 0, ""
            planned: Planned | None = None
            while planned is None and tried < len(candidates):
                if progress is not None:
                    progress(f"{model} on {candidates[tried]}", tried, len(candidates))
                try:
                    planned = _require_plan(model, overrides, candidates[tried])
                except (PlanError, InputErrors) as error:
                    reason = f"{candidates[tried]}: {str(error).splitlines()[0]}"
                tried += 1
            parallel = None if planned is None else planned.plan.parallel
            yield SmallestMachine(
                model=model,
                parameters=parameters,
                family=family,
                machine=None if planned is None else planned.machine.name,
                devices=None if parallel is None else parallel.devices,
                parallelism=None
                if parallel is None
                else f"PP={parallel.pipeline} TP={parallel.tensor} DP={parallel.data}",
                prediction=None if planned is None else planned.prediction,
                machines_tried=tuple(candidates[:tried]),
                infeasible_reason=reason,
            )


def _machine_sizes(family: str) -> tuple[Machine, ...]:
    """One device, the sizes that are sold by name, then twice as many hosts each time."""
    families = {each.name: each for each in host_families()}
    if family not in families:
        return (load_machine(family),)
    return tuple(load_machine(name) for name in _size_names(families[family]))


def _size_names(family: HostFamily) -> Iterator[str]:
    if family.devices_per_host > 1:
        yield family.device
    sizes = sorted(family.named_sizes, key=lambda name: family.named_sizes[name])
    yield from sizes
    count = 2 * family.named_sizes[sizes[-1]] if sizes else 2 if family.counts == "devices" else 1
    while count <= family.max_count:
        yield family.name if count == family.default_count else f"{family.name}:{count}"
        count *= 2


def _capacity_bytes(machine: Machine, *, in_memory: bool) -> int:
    """Bytes of all devices together: device memory alone, or with all offload tiers."""
    tiers = machine.device.tiers[:1] if in_memory else machine.device.tiers
    return machine.devices * sum(tier.capacity_bytes for tier in tiers)


def _require_plan(model: str, overrides: Sequence[str], machine: str) -> Planned:
    """The fastest plan, if one fits."""
    request = make_request(model, "margin=0", *overrides, machine=machine)
    planned = plan_request(request, NO_OBJECTS, None, explains=False)
    _ = planned.plan
    return planned
