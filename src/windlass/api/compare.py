"""Plans one request for many machines or batches, and prices a sparse plan beside a dense one."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType

from windlass.answer import Answers, Bullets
from windlass.atomic_files import cache_folder
from windlass.cost import predict_plan
from windlass.errors import InputErrors, PlanError
from windlass.flags import ManyNames, ManySizes, OnMachine, Watch, Written
from windlass.hardware import load_local_machine, machine_names
from windlass.jobs import (
    HERE,
    NO_OBJECTS,
    NO_OPTIONS,
    Model,
    Planned,
    Progress,
    RequestOptions,
    build_request,
    capture,
    draw_figure,
    find_machine,
    find_stack,
    needed_parts,
    plan_request,
    require_drawable,
    require_machine_names,
    split_overrides,
    with_tensor_shards,
)
from windlass.planner import Findings, explain_result, resolve_defaults
from windlass.report import (
    batch_comparison_figure,
    batch_comparison_table,
    infeasible_lines,
    machine_comparison_figure,
    machine_comparison_table,
)
from windlass.schema import Machine, MachineForecast, Request, SparseSpeedup

ALL_MACHINES = "all"
"""Stands for every machine of the catalogue, and for this one if it has been measured."""


class Forecasts(Answers[MachineForecast]):
    """The best plan for each machine or global batch; every number is predicted."""

    @property
    def exit_code(self) -> int:
        """1 if none has a plan."""
        return int(not any(forecast.plan for forecast in self))

    def json_tree(self) -> object:
        """The forecasts, each with its speed."""
        return [
            {
                **forecast.model_dump(mode="json"),
                "predicted": True,
                "tokens_per_second": forecast.tokens_per_second,
            }
            for forecast in self
        ]

    def _lines(self, table: RenderableType) -> Iterator[RenderableType]:
        """The table, and the reason wherever there is no plan."""
        yield table
        if lines := infeasible_lines(self):
            yield "no plan"
            yield Bullets(lines)


class MachineForecasts(Forecasts):
    """The best plan of a request on each machine, fastest first; those without a plan come last."""

    model: str

    def lines(self) -> Iterator[RenderableType]:
        """What is compared, and a row for each machine."""
        yield self.heading
        yield from self._lines(machine_comparison_table(self))

    @property
    def heading(self) -> str:
        """The model, and the batch that all train."""
        return f"{self.model}, {self[0].global_batch} sequences a step"


class BatchForecasts(Forecasts):
    """The best plan of a request for each global batch."""

    def lines(self) -> Iterator[RenderableType]:
        """A row for each global batch."""
        return self._lines(batch_comparison_table(self))


def compare_machines(
    model: Model = None,
    /,
    *overrides: str,
    on: ManyNames = (ALL_MACHINES,),
    options: RequestOptions = NO_OPTIONS,
    picture: Written = None,
    progress: Watch = None,
) -> MachineForecasts:
    """Plan one model for many machines: where it fits, how fast it is, and what limits it.

    The exit code is 1 if the model fits on none of them. What a request leaves open of batch,
    sequence and steps is the same on all machines.

    For example: `windlass machines compare gpt3-13b --on h100 dgx-h100 train.batch=256`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `train.batch=256`; `windlass keys` lists all.
        on: Machines; `all` takes every one of the catalogue, and of each family the smallest.
        options: Device memory budget and request file.
        picture: Draw the comparison to this `.svg` or `.png` file.
        progress: Called with the machine that is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or a machine's name.
    """
    if picture is not None:
        require_drawable(picture, pages=False)
    machines, more = split_overrides(on)
    require_machine_names(machines)
    request = build_request(model, (*overrides, *more), options)
    graph = capture(request.model_identity, stack=find_stack(request.stack))
    by_name = {
        name: find_machine(name, progress=progress, needs=needed_parts(request, graph))
        for name in requested_names(machines, machine_names())
    }
    # All train the same batch: the default for the first accelerator, if there is one.
    first = min(by_name.values(), key=lambda machine: machine.device.kind == "cpu")
    request, _ = resolve_defaults(request, graph, first)
    found: list[MachineForecast] = []
    for index, (name, machine) in enumerate(by_name.items()):
        if progress is not None:
            progress(f"planning for {name}", index, len(by_name))
        on_machine = request.model_copy(update={"machine": name})
        found.append(_forecast(on_machine, machine, progress))
    forecasts = MachineForecasts(sorted(found, key=lambda forecast: -forecast.tokens_per_second))
    forecasts.model = request.model.name
    if picture is not None:
        draw_figure(machine_comparison_figure(forecasts, forecasts.heading), picture)
    return forecasts


def batch(
    model: Model = None,
    /,
    *overrides: str,
    machine: OnMachine = None,
    sizes: ManySizes = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    options: RequestOptions = NO_OPTIONS,
    picture: Written = None,
    progress: Watch = None,
) -> BatchForecasts:
    """Compare global batch sizes: how each divides into micro-batches, and how fast it is.

    The exit code is 1 if none has a plan.

    For example: `windlass batch gpt3-13b --on dgx-h100 --sizes 64,256,1024`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, or your own `file.py:function`.
        overrides: `key=value`, such as `parallel.data=4`; `windlass keys` lists all.
        machine: The machine (`windlass machines` lists them); `here` if not given.
        sizes: Global batches in sequences.
        options: Device memory budget and request file.
        picture: Draw the comparison to this `.svg` or `.png` file.
        progress: Called with the global batch that is being planned for.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    for size in sizes:
        build_request(None, (f"train.batch={size}",), NO_OPTIONS)
    if picture is not None:
        require_drawable(picture, pages=False)
    request = build_request(model, overrides, options, machine=machine)
    graph = capture(request.model_identity, stack=find_stack(request.stack))
    needs = needed_parts(request, graph)
    target = find_machine(request.machine, progress=progress, needs=needs)
    found: list[MachineForecast] = []
    findings = Findings()
    for index, size in enumerate(sizes):
        if progress is not None:
            progress(f"planning for {size} sequences a step", index, len(sizes))
        train = request.train.model_copy(update={"batch": size})
        of_size = request.model_copy(update={"train": train})
        found.append(_forecast(of_size, target, progress, findings))
    forecasts = BatchForecasts(found)
    if picture is not None:
        heading = f"{request.model.name} on {request.machine}"
        draw_figure(batch_comparison_figure(forecasts, heading), picture)
    return forecasts


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
        catalog: the names that `ALL_MACHINES` stands for.
    """
    for name in dict.fromkeys(requested):
        if name != ALL_MACHINES:
            yield name
            continue
        if load_local_machine(cache_folder()) is not None:
            yield HERE
        yield from catalog


def _forecast(
    request: Request, machine: Machine, progress: Progress | None, findings: Findings | None = None
) -> MachineForecast:
    reason = ""
    chosen = prediction = None
    try:
        result = plan_request(
            request, NO_OBJECTS, progress, explains=False, findings=findings
        ).result
        chosen, prediction = result.plan, result.prediction
        reason = "" if result.fits else explain_result(result).verdict
    except (InputErrors, PlanError) as error:
        reason = "; ".join(line.removeprefix("- ") for line in str(error).splitlines())
    return MachineForecast(
        machine=machine.name, devices=machine.devices, global_batch=request.train.batch,
        plan=chosen, prediction=prediction, infeasible_reason=reason,
    )  # fmt: skip
