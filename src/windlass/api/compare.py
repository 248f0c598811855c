"""Across: one request planned for on many machines, or with many global batches on one."""

from collections.abc import Iterator, Sequence

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import capture
from windlass.api.plan import plan
from windlass.atomic_files import cache_folder
from windlass.errors import InputErrors, PlanError
from windlass.hardware import catalog
from windlass.hardware.local_machine import load_local_machine
from windlass.planner.explain import explain
from windlass.schema.comparison import MachineForecast
from windlass.schema.machine import Machine
from windlass.schema.request import Request

ALL_MACHINES = "all"
"""In place of names: every machine of the catalogue, and this one if it has been measured."""


def compare_machines(
    request: Request, machines: Sequence[str], *, progress: Progress | None = None
) -> tuple[MachineForecast, ...]:
    """What each machine does for a request: those with a plan first, the fastest first.

    Args:
        request: its own machine has no say.
        machines: names, or `ALL`.
        progress: told which machine is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or a machine's name.
    """
    capture(request.model)
    found = {name: find_machine(name, progress=progress) for name in _names(machines)}
    offers: list[MachineForecast] = []
    for at, (name, machine) in enumerate(found.items()):
        if progress is not None:
            progress(f"planning for {name}", at, len(found))
        named = request.model_copy(update={"machine": name})
        offers.append(_offer(named, machine, progress))
    return tuple(sorted(offers, key=lambda each: -each.tokens_per_second))


def compare_batches(
    request: Request, sizes: Sequence[int], *, progress: Progress | None = None
) -> Iterator[MachineForecast]:
    """What a machine does with each global batch.

    Args:
        request: its own global batch has no say.
        sizes: global batches in sequences.
        progress: told which is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    machine = find_machine(request.machine, progress=progress)
    capture(request.model)
    for at, size in enumerate(sizes):
        if progress is not None:
            progress(f"planning for {size} sequences a step", at, len(sizes))
        train = request.train.model_copy(update={"batch": size})
        yield _offer(request.model_copy(update={"train": train}), machine, progress)


def _names(asked: Sequence[str]) -> Iterator[str]:
    for name in dict.fromkeys(asked):
        if name != ALL_MACHINES:
            yield name
            continue
        if load_local_machine(cache_folder()) is not None:
            yield HERE
        yield from catalog.machine_names()


def _offer(request: Request, machine: Machine, progress: Progress | None) -> MachineForecast:
    refused = ""
    chosen = prediction = None
    try:
        choice = plan(request, progress=progress).result
        chosen, prediction = choice.plan, choice.prediction
        refused = "" if choice.fits else explain(choice).verdict
    except (InputErrors, PlanError) as error:
        refused = "; ".join(line.removeprefix("- ") for line in str(error).splitlines())
    return MachineForecast(
        machine=machine.name, devices=machine.devices, global_batch=request.train.batch,
        plan=chosen, prediction=prediction, infeasible_reason=refused,
    )  # fmt: skip
