"""Finds the smallest machine of a family that can train a model, by planning on each size."""

from collections.abc import Iterator, Sequence

from windlass.api.machines import Progress
from windlass.api.model_graph import capture
from windlass.api.objects import NO_OBJECTS
from windlass.api.plan import Planned, make_request, plan_request
from windlass.errors import InputErrors, PlanError
from windlass.hardware import HostFamily, host_families, load_machine
from windlass.schema import Machine, SmallestMachine

_STATE_BYTES = 16
"""Bytes of training state per parameter: bfloat16 weight and gradient, float32 master and two
moments, 2 + 2 + 4 + 8. At best they are sharded over all devices, but must lie somewhere."""


def smallest_machines(
    models: Sequence[str],
    families: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    in_memory: bool = False,
    progress: Progress | None = None,
) -> Iterator[SmallestMachine]:
    """Yields the smallest machine of each family for each model.

    Machines whose memory is too small for the training state alone are skipped. The others are
    planned for, smallest first, until a plan fits.

    Args:
        models: names from the catalogue.
        families: names of families or of single machines from the catalogue.
        overrides: `key=value` for all models, such as `train.batch=256`.
        in_memory: keep all layers and their optimizer state in device memory; otherwise layers may
            take turns in phases, and state may be offloaded.
        progress: called with the machine that is being planned for.

    Raises:
        WindlassError: what is wrong with a request, a model or a family.
    """
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
    """The fastest plan, if one fits.

    Raises:
        PlanError: no plan fits.
        InputErrors: the request has no plan on this machine.
    """
    request = make_request(model, "margin=0", *overrides, machine=machine)
    planned = plan_request(request, NO_OBJECTS, None, looks_for_changes=False)
    _ = planned.plan
    return planned
