"""The captured graph of a requested model, kept between processes.

Modules that import torch load only when something must be captured for the first time.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import Progress
from windlass.atomic_files import cache_folder
from windlass.capture.graph_cache import graph_key, load_graph, save_graph
from windlass.planner.space.options import open_tensor_degrees
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.request import ModelRequest, Request
from windlass.torch_ext.cpu_allocator import install_allocator

if TYPE_CHECKING:
    from windlass.models.layer_stack import LayerStack


def capture(model: ModelRequest) -> Graph:
    """The graph of a model; captured once, then found again until the model or our code changes.

    Raises:
        ModelError: unknown, or no chain of layers.
    """
    folder, key = _kept(model)
    graph = load_graph(folder, key)
    if graph is None:
        # Before torch's first tensor, and a run may follow in this process.
        install_allocator()
        from windlass.capture.capture_layers import capture_graph as capture_chain

        graph = capture_chain(build_requested_model(model))
        save_graph(folder, key, graph)
    return graph


def capture_open_tensor_degrees(
    request: Request, graph: Graph, machine: Machine, *, progress: Progress | None = None
) -> Graph:
    """The graph in all slices that a request leaves open on a machine; as `in_slices`.

    Of a grid that the model cannot be cut in the next quick one takes the place.
    """
    while True:
        known = graph.unshardable
        asked = open_tensor_degrees(request, machine, known)
        graph = capture_tensor_degrees(request.model, graph, asked, progress=progress)
        if graph.unshardable == known:
            return graph


def capture_tensor_degrees(
    model: ModelRequest,
    graph: Graph,
    degrees_asked: Iterable[int],
    *,
    progress: Progress | None = None,
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
        each
        for each in degrees_asked
        if each not in graph.tensor_shards and each not in graph.unshardable
    ]
    if missing:
        install_allocator()
        from windlass.capture.capture_layers import capture_tensor_shards

        chain = build_requested_model(model)
        for done, degree in enumerate(missing):
            if progress is not None:
                progress(f"{model.name} in {degree} slices", done, len(missing))
            graph = capture_tensor_shards(chain, graph, (degree,))
        save_graph(*_kept(model), graph)
    return graph


def _kept(model: ModelRequest) -> tuple[Path, str]:
    """The folder and the key under which a model's graph is kept."""
    own_file = Path(model.name.partition(":")[0]) if ".py" in model.name else None
    return cache_folder() / "graphs", graph_key(model.to_json(), own_file)


def build_requested_model(model: ModelRequest, *, seed: int | None = None) -> "LayerStack":
    """The chain of a requested model, on the meta device where nothing is lost by it.

    Args:
        model: what is asked for.
        seed: of a run. A user's own file is then built with the weights that its code gives them;
            a catalogue model's are drawn later, layer by layer. None: no weights are needed.

    Raises:
        ModelError: unknown, or no chain of layers.
    """
    from windlass.models.build import build_layer_stack

    dials = model.model_dump(exclude={"name", "sharding_rules"}, exclude_none=True)
    device = "cpu" if seed is not None and ".py" in model.name else "meta"
    return build_layer_stack(
        model.name, dials, device=device, seed=seed or 0, sharding_rules=model.sharding_rules
    )
