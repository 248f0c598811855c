"""Needed: the smallest machine of a family that a model can be trained on, by planning on each."""

from collections.abc import Iterator, Sequence

from windlass.api.machines import Progress
from windlass.api.model_graph import capture
from windlass.api.plan import Planned, make_request, plan
from windlass.errors import InputErrors, PlanError
from windlass.hardware import catalog
from windlass.hardware.host_family import HostFamily
from windlass.schema.comparison import SmallestMachine
from windlass.schema.machine import Machine

_STATE_BYTES = 16
"""A parameter in bfloat16 with its gradient, float32 master and two moments: 2 + 2 + 4 + 8; what
shards over all devices at best, and must lie somewhere."""


def smallest_machines(
    models: Sequence[str],
    families: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    in_memory: bool = True,
    progress: Progress | None = None,
) -> Iterator[SmallestMachine]:
    """The smallest machine of each family for each model.

    Machines on which the state of the model alone has no room are passed over; the others are
    planned for, smallest first, until a plan fits.

    Args:
        models: names of the catalog.
        families: of the catalog.
        overrides: for all of them, such as `train.batch=256`.
        whole: all layers stay in memory with their optimizer state; else they may take turns in
            phases, and state may live in a tier beyond.
        progress: told which machine is being planned for.

    Raises:
        WindlassError: what is wrong with a request, a model or a family.
    """
    ladders = {name: _ladder(name) for name in families}
    words = (*(("offload.optimizer=near",) if in_memory else ()), *overrides)
    for model in models:
        parameters = capture(make_request(model, *words).model).parameter_count
        for family, ladder in ladders.items():
            able = [
                machine.name
                for machine in ladder
                if _room(machine, whole=in_memory) >= _STATE_BYTES * parameters
            ]
            tried, refused = 0, ""
            found: Planned | None = None
            while found is None and tried < len(able):
                if progress is not None:
                    progress(f"{model} on {able[tried]}", tried, len(able))
                try:
                    found = _planned(model, words, able[tried])
                except (PlanError, InputErrors) as error:
                    refused = f"{able[tried]}: {str(error).splitlines()[0]}"
                tried += 1
            yield _need(model, parameters, family, found, able[:tried], refused)


def _ladder(family: str) -> tuple[Machine, ...]:
    """One device, then what is sold by name or twice as many hosts each time."""
    known = next((each for each in catalog.host_families() if each.name == family), None)
    if known is None:
        return (catalog.load_machine(family),)
    return tuple(catalog.load_machine(name) for name in _names(known))


def _names(family: HostFamily) -> Iterator[str]:
    if family.devices_per_host > 1:
        yield family.device
    if family.named_sizes:
        yield from sorted(family.named_sizes, key=lambda name: family.named_sizes[name])
        return
    hosts = 1
    while hosts <= family.max_hosts:
        yield f"{family.name}:{hosts}" if hosts > 1 else family.name
        hosts *= 2


def _room(machine: Machine, *, whole: bool) -> int:
    """Bytes that all devices have together, near, or also in the tiers beyond."""
    tiers = machine.device.tiers[:1] if whole else machine.device.tiers
    return machine.devices * sum(tier.capacity_bytes for tier in tiers)


def _planned(model: str, words: Sequence[str], machine: str) -> Planned:
    """The plan that fits.

    Raises:
        PlanError: none does.
        Faults: the request has no plan on this machine.
    """
    planned = plan(model, *words, machine=machine)
    _ = planned.plan
    return planned


def _need(
    model: str,
    parameters: int,
    family: str,
    found: Planned | None,
    tried: Sequence[str],
    refused: str,
) -> SmallestMachine:
    cut = None if found is None else found.plan.parallel
    return SmallestMachine(
        model=model,
        parameters=parameters,
        family=family,
        machine=None if found is None else found.machine.name,
        devices=None if cut is None else cut.devices,
        parallelism=None if cut is None else f"p{cut.pipeline} t{cut.tensor} r{cut.data}",
        prediction=None if found is None else found.prediction,
        machines_tried=tuple(tried),
        infeasible_reason=refused,
    )
