"""Planning: from a request to a plan and its prediction; runs nothing.

Rooms that need torch are imported only where something must be captured or measured for the first
time, so that planning answers at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.atomic_files import cache_folder
from windlass.capture.graph_cache import graph_key, load_graph, save_graph
from windlass.errors import PlanError, RequestError
from windlass.hardware import catalog as catalogue
from windlass.hardware.local_machine import load_here, save_here
from windlass.planner.choose import choose
from windlass.planner.explain import explain
from windlass.planner.result import Choice
from windlass.planner.space.options import degrees
from windlass.planner.space.pinned_parallelism import cut_of
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import ModelRequest, Request
from windlass.torch_ext.cpu_allocator import prepare_allocator

if TYPE_CHECKING:
    from windlass.models.layer_stack import Chain

HERE = "here"
"""The name of the machine that this program runs on."""

_NEAREST = 4
"""Plans over several devices that come nearest to fitting, as told where none does."""

Progress = Callable[[str, int, int | None], None]
"""Told a label, what is done, and of how much (None where that is not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request with everything that was found for it."""

    request: Request
    graph: Graph
    machine: Machine
    choice: Choice

    @property
    def plan(self) -> Plan:
        """The chosen plan.

        Raises:
            PlanError: nothing fits; the message names the cheapest changes that would.
        """
        if self.choice.plan is None:
            raise self._refusal()
        return self.choice.plan

    @property
    def prediction(self) -> Prediction:
        """What the chosen plan will cost.

        Raises:
            PlanError: nothing fits.
        """
        if self.choice.prediction is None:
            raise self._refusal()
        return self.choice.prediction

    def _refusal(self) -> PlanError:
        told = explain(self.choice)
        model = self.request.model.name
        nearest = told.refused[:_NEAREST] if self.machine.devices > 1 else ()
        lines = [f"- {line}" for line in (*told.help, *nearest)]
        return PlanError("\n".join([f"`{model}` {told.verdict}; what would help:", *lines]))


def ask(
    model: str | None = None,
    *overrides: str,
    machine: str | None = None,
    near: str | None = None,
    file: Path | None = None,
) -> Request:
    """The request of *defaults < file < overrides*, and what is named apart last.

    Raises:
        RequestError: the file cannot be read.
        Faults: all keys and values that do not fit.
    """
    apart = {"model.name": model, "machine": machine, "memory": near}
    named = (f"{key}={value!r}" for key, value in apart.items() if value is not None)
    return Request.resolve(file, (*overrides, *named))


def plan(
    model: str | Request,
    *overrides: str,
    machine: str | None = None,
    near: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Chooses a plan and predicts it; runs nothing.

    Args:
        model: a name, `file.py:function`, or a whole request.
        overrides: `key=value`, such as `train.batch=32`; a whole request takes none, nor
            `machine` or `memory`: it says all that already.
        machine: a name of the catalogue; None means this machine.
        near: budget for the near tier, such as `4GiB`.
        progress: told how far a first measurement of this machine, or of a model's slices, is.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    if isinstance(model, str):
        request = ask(model, *overrides, machine=machine, near=near)
    elif overrides or machine or near:
        raise RequestError("a whole request takes no overrides; give them to `ask`, which makes it")
    else:
        request = model
    graph = capture(request.model)
    found = find_machine(request.machine, progress=progress)
    devices = cut_of(request).devices
    if devices > 1 and request.machine == HERE and found.device.kind == "cpu":
        found = found.shared(devices)
    graph = in_open_slices(request, graph, found, progress=progress)
    if progress is not None:
        progress("searching", 0, None)
    choice = choose(request, graph, found)
    if progress is not None:
        progress("searching", 1, 1)
    return Planned(request=request, graph=graph, machine=found, choice=choice)


def capture(model: ModelRequest) -> Graph:
    """The graph of a model; captured once, then found again until the model or our code changes.

    Raises:
        ModelError: unknown, or no chain of layers.
    """
    folder, key = _kept(model)
    graph = load_graph(folder, key)
    if graph is None:
        # Before torch's first tensor, and a run may follow in this process.
        prepare_allocator()
        from windlass.capture.capture_graph import capture as capture_chain

        graph = capture_chain(chain_of_request(model))
        save_graph(folder, key, graph)
    return graph


def in_open_slices(
    request: Request, graph: Graph, machine: Machine, *, progress: Progress | None = None
) -> Graph:
    """The graph in all slices that a request leaves open on a machine; as `in_slices`.

    Of a grid that the model cannot be cut in the next quick one takes the place.
    """
    while True:
        known = graph.unshardable
        asked = degrees(request, machine, known)
        graph = in_slices(request.model, graph, asked, progress=progress)
        if graph.unshardable == known:
            return graph


def in_slices(
    model: ModelRequest, graph: Graph, asked: Iterable[int], *, progress: Progress | None = None
) -> Graph:
    """The graph with its layers cut over so many slices too; each degree is captured once.

    Args:
        model: that the graph was captured from.
        graph: of `capture`.
        asked: degrees, 2 or more each. One that cannot be is noted in the graph.
        progress: told which degree is captured, some seconds each.

    Raises:
        ModelError: a slice does what cannot be counted.
    """
    missing = [
        each for each in asked if each not in graph.tensor_shards and each not in graph.unshardable
    ]
    if missing:
        prepare_allocator()
        from windlass.capture.capture_graph import capture_slices

        chain = chain_of_request(model)
        for done, degree in enumerate(missing):
            if progress is not None:
                progress(f"{model.name} in {degree} slices", done, len(missing))
            graph = capture_slices(chain, graph, (degree,))
        save_graph(*_kept(model), graph)
    return graph


def _kept(model: ModelRequest) -> tuple[Path, str]:
    """The folder and the key under which a model's graph is kept."""
    own_file = Path(model.name.partition(":")[0]) if ".py" in model.name else None
    return cache_folder() / "graphs", graph_key(model.to_json(), own_file)


def find_machine(name: str, *, progress: Progress | None = None) -> Machine:
    """A machine of the catalogue; `here` is measured on first use.

    Raises:
        MachineError: unknown, or it cannot be measured.
    """
    if name != HERE:
        return catalogue.find(name)
    return load_here(cache_folder()) or probe(progress=progress)


def probe(*, progress: Progress | None = None) -> Machine:
    """Measures this machine and keeps the result for this user.

    Raises:
        MachineError: something cannot be measured.
    """
    from windlass.hardware.probe.probe import probe as measure

    machine = measure(progress, cache_folder())
    save_here(cache_folder(), machine)
    return machine


def chain_of_request(model: ModelRequest, *, seed: int | None = None) -> "Chain":
    """The chain of a requested model, on the meta device where nothing is lost by it.

    Args:
        model: what is asked for.
        seed: of a run. A user's own file is then built with the weights that its code gives them;
            a catalogue model's are drawn later, layer by layer. None: no weights are needed.

    Raises:
        ModelError: unknown, or no chain of layers.
    """
    from windlass.models.build import build_chain

    dials = model.model_dump(exclude={"name", "sharding_rules"}, exclude_none=True)
    device = "cpu" if seed is not None and ".py" in model.name else "meta"
    return build_chain(model.name, dials, device=device, seed=seed or 0, cuts=model.sharding_rules)
