"""The graph of a requested model: computed from a catalogue model's configuration, else captured.

A model of one's own is captured once, and its graph cached between processes. Modules that import
torch load only when something must be captured for the first time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from windlass import planner
from windlass.atomic_files import cache_folder
from windlass.capture import (
    NamedTrace,
    analytic_graph,
    analytic_tensor_shards,
    analytic_traces,
    check_analytic_degrees,
    graph_key,
    load_graph,
    save_graph,
    stack_graph,
)
from windlass.errors import RequestError
from windlass.jobs.known_machines import Progress
from windlass.jobs.objects import NO_OBJECTS, PlannedObjects, model_arguments
from windlass.models import (
    TransformerConfig,
    apply_model_arguments,
    find_model_folder,
    has_config,
    is_huggingface,
    is_residual,
    keys_of_transformers,
    model_config,
    refuse_sparse_experts,
    runs_by_transformers,
)
from windlass.schema import (
    Graph,
    LoraRequest,
    Machine,
    ModelIdentity,
    Precision,
    ResolvedRequest,
    Stack,
    grid_columns,
    is_users_own,
)
from windlass.sparsity import sparsity_of_leg
from windlass.torch_ext import install_allocator

if TYPE_CHECKING:
    from windlass.models import LayerStack


_MOST_PARAMETERS_TRIED = 500_000_000
"""Largest model whose layers are tried for a causal mask: 2 GB in float32."""


def capture(
    model: ModelIdentity, objects: PlannedObjects = NO_OBJECTS, stack: Stack | None = None
) -> Graph:
    """The graph of a model; what is captured is cached until the model or Windlass changes.

    Args:
        model: the model.
        objects: a model or a loss that no file holds, whose graph is not cached.
        stack: software that computes it; None means Windlass's own runtime.

    Raises:
        ModelError: the model is unknown, or is no sequence of layers.
        RequestError: another stack, whose kernels are known for catalogue models only.
    """
    if _has_own_kernels(stack):
        return _graph_on_stack(model, stack, (), objects)
    config = _catalogue_config(model, objects)
    if config is not None:
        return analytic_graph(config)
    if not objects.is_rebuildable:
        install_allocator()
        from windlass.capture import capture_graph

        return _with_look_ahead(capture_graph(objects.stack(model, seed=None)), model, objects)
    folder, key = _cache_entry(model)
    graph = load_graph(folder, key)
    if graph is None:
        # This must precede torch's first tensor, because a run may follow in this process.
        install_allocator()
        from windlass.capture import capture_graph

        graph = _with_look_ahead(capture_graph(build_requested_model(model)), model, objects)
        graph = _with_base(graph, model)
        save_graph(folder, key, graph)
    return graph


def capture_traces(
    model: ModelIdentity, precision: Precision, objects: PlannedObjects = NO_OBJECTS
) -> dict[str, NamedTrace]:
    """The calls and buffers of each kind of layer of a model, which its graph is made from.

    Raises:
        ModelError: the model is unknown, or is no sequence of layers.
    """
    config = _catalogue_config(model, objects)
    if config is not None:
        return analytic_traces(config, precision)
    install_allocator()
    from windlass.capture import capture_traces

    return capture_traces(objects.stack(model, seed=None), precision)


def _catalogue_config(model: ModelIdentity, objects: PlannedObjects) -> TransformerConfig | None:
    """The configuration from which a model's graph follows; None if it must be captured."""
    if not objects.is_rebuildable or model.sharding_rules or is_users_own(model.name):
        return None
    if model.lora is not None or model.frozen is not None or is_residual(model.name):
        return None
    if not has_config(model.name) and is_huggingface(model.name):
        return None
    if model.sparsity and (model.sparsity.modules or model.sparsity.mask):
        return None
    config = apply_model_arguments(model_config(model.name), model_arguments(model))
    if config.image is not None or config.takes_pairs:
        return None
    refuse_sparse_experts(config, sparse=model.sparsity is not None)
    return replace(config, sparsity=sparsity_of_leg(model.sparsity))


def _has_own_kernels(stack: Stack | None) -> TypeGuard[Stack]:
    """Whether a stack computes other layers than Windlass does."""
    return stack is not None and stack.engine is None


def _graph_on_stack(
    model: ModelIdentity, stack: Stack, degrees: Iterable[int], objects: PlannedObjects
) -> Graph:
    """The graph of a catalogue model on another stack, with some tensor-parallel degrees."""
    if model.sparsity is not None:
        raise RequestError(
            f"`sparsity` is asked for, and `{stack.name}` trains no sparse weights; leave out "
            "`--stack` or `sparsity`"
        )
    if model.frozen is not None or (model.lora is not None and not stack.can.adapters):
        raise RequestError(
            f"`lora` or `train.frozen` is asked for, and how `{stack.name}` trains a part of the "
            "weights is not known; leave `--stack` or them out"
        )
    adapter = None if model.lora is None else _adapter_rank(model.lora, stack)
    config = _catalogue_config(model.model_copy(update={"lora": None}), objects)
    if config is None:
        raise RequestError(
            f"`{model.name}` is a model of your own, and how `{stack.name}` computes it is not "
            "known; leave `--stack` out, or name a catalogue model of its shape by `model.layers` "
            "and `model.width`"
        )
    if config.experts is not None and not stack.can.expert:
        raise RequestError(
            f"`{model.name}` has experts, and how `{stack.name}` computes these is not known; "
            "leave `--stack` out, or name `nemo`"
        )
    if config.experts is not None and adapter is not None:
        raise RequestError(
            f"`lora` is asked for beside the experts of `{model.name}`, and how `{stack.name}` "
            "trains adapters of experts is not known; leave `--stack` or `lora` out"
        )
    return stack_graph(config, stack, degrees, adapter=adapter)


def _adapter_rank(lora: LoraRequest, stack: Stack) -> int:
    """The rank of adapters beside all linear layers of blocks, of which a stack's cost is known."""
    odd = [
        f"`lora.{name}`"
        for name in ("targets", "ranks", "trained", "adapter", "base")
        if getattr(lora, name) is not None
    ]
    if odd:
        raise RequestError(
            f"{', '.join(odd)}: the cost of adapters under `{stack.name}` is known for `lora.rank` "
            "alone, beside all linear layers of blocks; leave `--stack` or it out"
        )
    return lora.rank


def model_notes(graph: Graph, objects: PlannedObjects = NO_OBJECTS) -> tuple[str, ...]:
    """What a user should know about a model before it is trained, a sentence each."""
    if graph.looks_ahead is None or objects.loss is not None or objects.examples is not None:
        return ()
    note = (
        f"in layer {graph.looks_ahead}, a token sees the tokens after it, so the model can copy "
        "the next token instead of predicting it: give its attention a causal mask (such as `mask` "
        "with `is_causal=True`), or train a catalogue model of masked tokens (`bert-base`)"
    )
    return (note,)


def head_notes(model: ModelIdentity) -> tuple[str, ...]:
    """Which code runs a model if not ours, and where a head is not that of its folder."""
    notes = (*_code_notes(model), *_whole_notes(model))
    classes = model_arguments(model).get("classes")
    if classes is None or not is_huggingface(model.name):
        return notes
    from windlass.models import pretrained_classes

    stored = pretrained_classes(model.name)
    if stored in (None, classes):
        return notes
    why = f"that of `{model.name}` has {stored:,}, and all other weights are the folder's"
    if not stored:
        why = (
            f"`{model.name}` has none of classes, and the body (with the pooler, where it has one) "
            "has the folder's weights"
        )
    return (f"draws the head anew, for {classes} classes: {why}", *notes)


def _code_notes(model: ModelIdentity) -> Iterator[str]:
    """Whose code computes a model of Hugging Face that our layers do not, and for which keys."""
    if runs_by_transformers(model.name):
        keys = " and ".join(f"`{key}`" for key in keys_of_transformers(model.name)[:3])
        why = f", for its {keys}" if keys else ""
        yield f"`{model.name}` is computed by the code of `transformers`, without dropout{why}"


def _whole_notes(model: ModelIdentity) -> Iterator[str]:
    """What is trained whole beside adapters, a sentence if there is any."""
    if model.lora is not None and model.lora.trained:
        names = " and ".join(f"`{name}`" for name in model.lora.trained)
        yield f"trains {names} whole, beside the adapters (`lora.trained`)"


def _with_look_ahead(graph: Graph, model: ModelIdentity, objects: PlannedObjects) -> Graph:
    """The graph with the layer of a user's model, if any, in which a token sees later ones.

    A large model is not tried, because that takes its weights.
    """
    written_by_user = objects.model is not None or is_users_own(model.name)
    if not written_by_user or graph.parameter_count > _MOST_PARAMETERS_TRIED:
        return graph
    from windlass.models import layer_that_looks_ahead

    layer = layer_that_looks_ahead(objects.stack(model, seed=0))
    return graph.model_copy(update={"looks_ahead": layer})


def _with_base(graph: Graph, model: ModelIdentity) -> Graph:
    """The graph with the numbers of the files in which all of its frozen weights stand, if any."""
    if not graph.has_frozen or is_users_own(model.name):
        return graph
    from windlass.models import base_format

    # Files are opened with a seed alone, and nothing but their headers is read.
    return graph.model_copy(update={"base": base_format(NO_OBJECTS.stack(model, seed=0))})


def capture_open_tensor_degrees(
    request: ResolvedRequest,
    graph: Graph,
    machine: Machine,
    *,
    every_grid: bool = False,
    objects: PlannedObjects = NO_OBJECTS,
    progress: Progress | None = None,
) -> Graph:
    """The graph with shards for every tensor-parallel degree that a request leaves open.

    A grid that the model cannot be sharded over is replaced by the next fast one, until all
    degrees are captured.

    Args:
        every_grid: whether the grids that need least memory are open too.

    Raises:
        ModelError: an operation of a shard cannot be counted.
    """
    if _has_own_kernels(machine.stack):
        # Only Windlass's own runtime has grids.
        wanted = planner.open_tensor_degrees(request, machine, every=every_grid)
        ranks = [int(degree) for degree in wanted if grid_columns(degree) == 1]
        return _graph_on_stack(request.model_identity, machine.stack, ranks, objects)
    if every_grid:
        graph = _with_tensor_errors(request, graph, machine, objects)
    while True:
        unshardable = graph.unshardable
        degrees = planner.open_tensor_degrees(request, machine, unshardable, every=every_grid)
        if machine.stack is not None:
            degrees = tuple(each for each in degrees if grid_columns(each) == 1)
        graph = capture_tensor_degrees(
            request.model_identity, graph, degrees, objects=objects, progress=progress
        )
        if graph.unshardable == unshardable:
            return graph


def _with_tensor_errors(
    request: ResolvedRequest, graph: Graph, machine: Machine, objects: PlannedObjects
) -> Graph:
    """The graph with why its model cannot be sharded over some of all degrees."""
    degrees = planner.every_tensor_degree(request, machine)
    config = _catalogue_config(request.model_identity, objects)
    if config is not None:
        return check_analytic_degrees(config, graph, degrees)
    from windlass.capture import check_tensor_degrees

    return check_tensor_degrees(objects.stack(request.model_identity, seed=None), graph, degrees)


def capture_tensor_degrees(
    model: ModelIdentity,
    graph: Graph,
    degrees: Iterable[int],
    *,
    objects: PlannedObjects = NO_OBJECTS,
    stack: Stack | None = None,
    progress: Progress | None = None,
) -> Graph:
    """The graph with the layers' shards for some tensor-parallel degrees; each is captured once.

    What was captured when the call is interrupted is kept.

    Args:
        degrees: 2 or more each. The graph lists those that the model cannot be sharded over.
        objects: a model or a loss that no file holds, whose graph is not cached.
        stack: software that computes it; None means Windlass's own runtime.
        progress: called with the degree that is being captured, some seconds each.

    Raises:
        ModelError: an operation of a shard cannot be counted.
    """
    if _has_own_kernels(stack):
        return _graph_on_stack(model, stack, (*graph.tensor_shards, *degrees), objects)
    missing = [
        degree
        for degree in degrees
        if degree not in graph.tensor_shards and degree not in graph.unshardable
    ]
    config = _catalogue_config(model, objects) if missing else None
    if config is not None:
        return analytic_tensor_shards(config, graph, missing)
    if missing:
        install_allocator()
        from windlass.capture import capture_tensor_shards

        layers = objects.stack(model, seed=None)
        for done, degree in enumerate(missing):
            if progress is not None:
                label = f"{model.name} with tensor-parallel degree {degree}"
                progress(label, done, len(missing))
            graph = capture_tensor_shards(layers, graph, (degree,))
            # After each degree, so that a capture that is interrupted goes on from there.
            if objects.is_rebuildable:
                save_graph(*_cache_entry(model), graph)
    return graph


def _cache_entry(model: ModelIdentity) -> tuple[Path, str]:
    """The folder and the key under which a model's graph is cached."""
    file = None
    if is_users_own(model.name):
        file = Path(model.name.partition(":")[0])
    elif is_huggingface(model.name):
        file = find_model_folder(model.name).config
    named = " ".join((model.to_json(), *_weight_files(model)))
    return cache_folder() / "graphs", graph_key(named, file)


def _weight_files(model: ModelIdentity) -> Iterator[str]:
    """Name, size and time of each file that frozen weights of a model may be read from."""
    if model.lora is None and model.frozen is None:
        return
    folders = [find_model_folder(model.name).config.parent] if is_huggingface(model.name) else []
    if model.lora is not None and model.lora.base is not None:
        folders.append(Path(model.lora.base))
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")) or [folder]:
            if file.is_file():
                stat = file.stat()
                yield f"{file} {stat.st_size} {stat.st_mtime_ns}"


def build_requested_model(model: ModelIdentity, *, seed: int | None = None) -> "LayerStack":
    """The layers of a requested model, on the meta device unless its own code makes the weights.

    Args:
        seed: the run's seed: a model from a user's file then has the weights that its code makes.
            Weights of a catalogue model are drawn later, layer by layer. None needs no weights.

    Raises:
        ModelError: the model is unknown, or is no sequence of layers.
    """
    return NO_OBJECTS.stack(model, seed=seed)
