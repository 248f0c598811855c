"""Plans one request for many machines or batches, and prices a sparse plan beside a dense one."""

from collections.abc import Iterable, Iterator, Sequence

from windlass.api.machines import HERE, Progress, find_machine, find_stack, needed_parts
from windlass.api.model_graph import capture
from windlass.api.objects import NO_OBJECTS
from windlass.api.plan import Planned, plan_request
from windlass.api.plan_file import with_tensor_shards
from windlass.atomic_files import cache_folder
from windlass.cost import predict_plan
from windlass.errors import InputErrors, PlanError
from windlass.hardware import load_local_machine, machine_names
from windlass.planner import explain_result, resolve_defaults
from windlass.schema import Machine, MachineForecast, Request, SparseSpeedup

ALL_MACHINES = "all"
"""Stands for every machine of the catalogue, and for this one if it has been measured."""


def compare_machines(
    request: Request, machines: Sequence[str], *, progress: Progress | None = None
) -> tuple[MachineForecast, ...]:
    """The best plan of a request on each machine, fastest first; those without a plan come last.

    Args:
        request: its own `machine` is ignored; what it leaves open of batch, sequence and steps is
            the same on all machines.
        machines: names, or `ALL_MACHINES`.
        progress: called with the machine that is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or a machine's name.
    """
    graph = capture(request.model_identity, stack=find_stack(request.stack))
    by_name = {
        name: find_machine(name, progress=progress, needs=needed_parts(request, graph))
        for name in requested_names(machines, machine_names())
    }
    # All train the same batch: the default for the first accelerator, if there is one.
    first = min(by_name.values(), key=lambda machine: machine.device.kind == "cpu")
    request, _ = resolve_defaults(request, graph, first)
    forecasts: list[MachineForecast] = []
    for index, (name, machine) in enumerate(by_name.items()):
        if progress is not None:
            progress(f"planning for {name}", index, len(by_name))
        on_machine = request.model_copy(update={"machine": name})
        forecasts.append(_forecast(on_machine, machine, progress))
    return tuple(sorted(forecasts, key=lambda forecast: -forecast.tokens_per_second))


def compare_batches(
    request: Request, sizes: Sequence[int], *, progress: Progress | None = None
) -> Iterator[MachineForecast]:
    """Yields the best plan of a request for each global batch.

    Args:
        request: its own global batch is ignored.
        sizes: global batches in sequences.
        progress: called with the global batch that is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    graph = capture(request.model_identity, stack=find_stack(request.stack))
    needs = needed_parts(request, graph)
    machine = find_machine(request.machine, progress=progress, needs=needs)
    for index, size in enumerate(sizes):
        if progress is not None:
            progress(f"planning for {size} sequences a step", index, len(sizes))
        train = request.train.model_copy(update={"batch": size})
        yield _forecast(request.model_copy(update={"train": train}), machine, progress)


def sparse_speedup(planned: Planned) -> SparseSpeedup | None:
    """The predicted speed-up of a plan, and its limit; None without a plan or sparse weights.

    Dense weights are planned alike: the same parallelism, batch, precision and phases, whether or
    not they fit.

    Args:
        planned: a plan with its prediction.

    Raises:
        ModelError: the dense model cannot be captured.
    """
    result, request, machine = planned.result, planned.request, planned.machine
    if request.sparsity is None or result.plan is None or result.prediction is None:
        return None
    plan, objects = result.plan, planned.objects
    model = request.model_copy(update={"sparsity": None}).model_identity
    graph = capture(model, objects, machine.stack)
    graph = with_tensor_shards(model, graph, plan, objects, machine.stack)
    dense = predict_plan(plan.model_copy(update={"graph": graph.label}), graph, machine)
    ideal_machine = machine.model_copy(update={"device": machine.device.with_ideal_sparsity()})
    ideal = predict_plan(plan, planned.graph, ideal_machine)
    return SparseSpeedup(
        dense_seconds=dense.step_seconds,
        speedup=dense.step_seconds / result.prediction.step_seconds,
        limit=dense.step_seconds / ideal.step_seconds,
    )


def requested_names(requested: Sequence[str], catalog: Iterable[str]) -> Iterator[str]:
    """Each requested name once; `ALL_MACHINES` means this machine, if measured, and the catalog.

    Args:
        requested: names of machines.
        catalog: the names that `ALL_MACHINES` stands for.
    """
    for name in dict.fromkeys(requested):
        if name != ALL_MACHINES:
            yield name
            continue
        if load_local_machine(cache_folder()) is not None:
            yield HERE
        yield from catalog


def _forecast(request: Request, machine: Machine, progress: Progress | None) -> MachineForecast:
    reason = ""
    chosen = prediction = None
    try:
        result = plan_request(request, NO_OBJECTS, progress, looks_for_changes=False).result
        chosen, prediction = result.plan, result.prediction
        reason = "" if result.fits else explain_result(result).verdict
    except (InputErrors, PlanError) as error:
        reason = "; ".join(line.removeprefix("- ") for line in str(error).splitlines())
    return MachineForecast(
        machine=machine.name, devices=machine.devices, global_batch=request.train.batch,
        plan=chosen, prediction=prediction, infeasible_reason=reason,
    )  # fmt: skip
