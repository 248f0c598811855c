"""Factories of tiny real documents: `tiny_graph(layers=2)`, `tiny_machine(...)`, ...

Graphs are kept: tests of random plans draw the same few hundreds of times, and each is built, and
its fingerprint computed, once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from windlass.capture.analytic import analytic_graph, analytic_tensor_shards
from windlass.models.catalog import apply_model_arguments, model_config
from windlass.program.activation_checkpointing import with_recompute
from windlass.schema.graph import (
    PRECISION_BYTES,
    Collective,
    CollectiveKind,
    Graph,
    LayerCost,
    LayerKind,
    LayerRun,
    MatmulShape,
    Op,
    ParameterInfo,
    Polynomial,
    Precision,
)  # fmt: skip
from windlass.schema.machine import Device, Link, Machine, Tier
from windlass.schema.machine.rates import Curve, MatmulRate, Point
from windlass.schema.plan import (
    Batch,
    MomentFormat,
    Offload,
    Plan,
    Recompute,
    ShardingDegrees,
    Stage,
)
from windlass.schema.sparsity import SparsityRequest
from windlass.schema.tensor_grid import TensorAxis, TensorGrid, grid_columns, grid_rows
from windlass.units import parse_bytes

HOST_OFFLOAD = Offload(parameters="host", gradients="host", optimizer="host")
"""Parameters, gradients and optimizer state are offloaded to the host; activations are not."""


def catalog_graph(
    name: str, *degrees: int, sparsity: SparsityRequest | None = None, **dials: float
) -> Graph:
    """`catalog_graph("gpt-tiny", 2, layers=3)`: the graph that a capture gives, in milliseconds."""
    config = replace(apply_model_arguments(model_config(name), dials), sparsity=sparsity)
    return analytic_tensor_shards(config, analytic_graph(config), degrees)


@cache
def tiny_graph(
    *,
    layers: int = 2,
    width: int = 32,
    vocabulary: int = 64,
    max_sequence: int | None = 64,
    tied: bool = True,
    sparse: bool = False,
) -> Graph:
    """An embedding, `layers` blocks of one linear layer each, and a head with the loss.

    `sparse` embeddings have gradients of looked-up rows only, as those of the model catalog do.
    """
    table = ParameterInfo(name="tokens.weight", shape=(vocabulary, width))
    head = ParameterInfo(
        name="output.weight",
        shape=(vocabulary, width),
        tied_to="embedding.tokens.weight" if tied else None,
    )
    square = ParameterInfo(name="linear.weight", shape=(width, width))
    kinds = {
        "embedding": LayerKind(
            name="embedding",
            parameters=(table,),
            costs=_costs(lambda e: _embedding_cost(e, width)),
            is_embedding=sparse,
        ),
        "block": LayerKind(
            name="block",
            parameters=(square,),
            costs=_costs(lambda e: _block_cost(e, width)),
            is_hidden=True,
            selective_costs=_costs(lambda e: _selective_cost(e, width))[::2],
        ),
        "head": LayerKind(
            name="head",
            parameters=(head,),
            costs=_costs(lambda e: _head_cost(e, width, vocabulary)),
        ),
    }
    chain = (
        LayerRun(kind="embedding", count=1),
        *((LayerRun(kind="block", count=layers),) if layers else ()),
        LayerRun(kind="head", count=1),
    )
    return Graph(
        name="tiny", vocabulary=vocabulary, max_sequence=max_sequence, layer_runs=chain, kinds=kinds
    )


@cache
def late_tied_graph(*, before: int = 1, between: int = 1) -> Graph:
    """Blocks, one block that owns a second weight, more blocks, and a head tied to that weight."""
    graph = tiny_graph(layers=1, tied=False)
    block, head = graph.kinds["block"], graph.kinds["head"]
    second = head.parameters[0].model_copy(update={"name": "second.weight"})
    owner = block.model_copy(update={"name": "owner", "parameters": (*block.parameters, second)})
    tied = second.model_copy(update={"name": "output.weight", "tied_to": "owner.second.weight"})
    tied_head = head.model_copy(update={"parameters": (tied,)})
    runs = (("embedding", 1), ("block", before), ("owner", 1), ("block", between), ("head", 1))
    return graph.model_copy(
        update={
            "layer_runs": tuple(LayerRun(kind=kind, count=count) for kind, count in runs if count),
            "kinds": {**graph.kinds, "owner": owner, "head": tied_head},
        }
    )


@cache
def expert_graph(*, experts: int = 12, layers: int = 4, width: int = 32) -> Graph:
    """A tiny graph whose blocks have experts of two matrices each, of which a token takes two."""
    graph = tiny_graph(layers=layers, width=width, tied=False)
    stacked = (experts, width, width)
    weights = tuple(
        ParameterInfo(name=f"experts.{name}.weight", shape=stacked, expert=True)
        for name in ("up", "down")
    )
    router = ParameterInfo(name="router.weight", shape=(experts, width))
    block = LayerKind(
        name="block",
        parameters=(router, *weights),
        costs=_costs(lambda e: _expert_cost(e, width, experts)),
        is_hidden=True,
    )
    return graph.model_copy(update={"name": "experts", "kinds": {**graph.kinds, "block": block}})


def _expert_cost(e: int, width: int, experts: int) -> dict[str, object]:
    """Rows go to two experts each, are multiplied twice, and are summed."""
    x, rows = Polynomial(bs=width * e), Polynomial(bs=2 * width * e)
    each, weight = Polynomial(bs=2 / experts), Polynomial(constant=experts * width * width * e)

    def moved(name: str, live: Polynomial) -> Op:
        return Op(name=name, kind="memory", read_bytes=x, written_bytes=rows, live_bytes=live)

    def product(name: str, times: int) -> Op:
        makes_gradient = name == "grouped_linear_weight_grad"
        count, side = Polynomial(constant=experts), Polynomial(constant=width)
        return Op(
            name=name,
            kind="matmul",
            flop=Polynomial(bs=2 * 2 * width * width),
            read_bytes=rows.doubled if makes_gradient else rows._replace(constant=weight.constant),
            written_bytes=weight if makes_gradient else rows,
            live_bytes=_times(rows, times),
            shape=MatmulShape(count, side, side, each)
            if makes_gradient
            else MatmulShape(count, each, side, side),
        )

    back = ("grouped_linear_input_grad", "grouped_linear_weight_grad")
    return {
        "forward": (
            moved("index_select", rows), product("grouped_linear", 2),
            product("grouped_linear", 3), moved("sum", _times(rows, 3)),
        ),
        "backward": (
            moved("expand", _times(rows, 3)), *(product(name, 4) for name in back),
            *(product(name, 3) for name in back), moved("sum", rows),
        ),
        "saved_bytes": rows.doubled, "input_bytes": x, "output_bytes": x,
    }  # fmt: skip


def sharded_graph(graph: Graph, degrees: tuple[int, ...] = (2, 4, TensorGrid(2, 2))) -> Graph:
    """A tiny graph with tensor-parallel shards, and a replicated norm in all layers but the first.

    Each rank has an equal part of the rows of every weight; in a grid also of a block's columns and
    of the norm's features.
    """
    width = graph.kinds["block"].parameters[0].shape[1]
    norm = ParameterInfo(name="norm.weight", shape=(width,))
    kinds = {
        name: kind
        if name == "embedding"
        else kind.model_copy(update={"parameters": (*kind.parameters, norm)})
        for name, kind in graph.kinds.items()
    }
    slices = {
        degree: {name: _shard_kind(kind, degree, width) for name, kind in kinds.items()}
        for degree in degrees
    }
    return graph.model_copy(update={"kinds": kinds, "tensor_shards": slices})


def _shard_kind(kind: LayerKind, degree: int, width: int) -> LayerKind:
    parameters = tuple(
        p.model_copy(update=_shard_parameter(p, degree, square=p.shape == (width, width)))
        for p in kind.parameters
    )
    own = parameters[0].shape[0]
    costs: Callable[[int], dict[str, object]]
    if kind.name == "embedding":
        costs = lambda e: _embedding_cost(e, width, degree)  # noqa: E731
    elif kind.name == "head":
        costs = lambda e: _head_cost(e, width, own, degree)  # noqa: E731
    else:
        costs = lambda e: _block_cost(e, width, degree)  # noqa: E731
    selective: tuple[LayerCost, ...] = ()
    if kind.selective_costs:
        selective = _costs(lambda e: _selective_cost(e, width, degree))[::2]
    return kind.model_copy(
        update={
            "parameters": parameters, "costs": _costs(costs), "selective_costs": selective,
        }
    )  # fmt: skip


def _shard_parameter(whole: ParameterInfo, degree: int, *, square: bool) -> dict[str, object]:
    """The sharded fields of a parameter: norms have one dimension, blocks square weights."""
    rows, columns = grid_rows(degree), grid_columns(degree)
    if len(whole.shape) == 1:
        common = "all" if columns == 1 else "tokens"
        return {"shape": (whole.shape[0] // columns,), "replicated_over": common}
    if square and columns > 1:
        return {"shape": (whole.shape[0] // rows, whole.shape[1] // columns)}
    return {"shape": (-(-whole.shape[0] // degree), *whole.shape[1:]), "shard_dim": 0}


def tiny_machine(
    *,
    memory: int | str = "1 GiB",
    host: int | str | None = None,
    disk: int | str | None = None,
    precisions: tuple[Precision, ...] = ("float32", "bfloat16"),
    devices: int = 1,
    runtime: int | str = 0,
    compiler: int | str = 0,
    bfloat16: float = 2e11,
) -> Machine:
    """One host of `devices` equal processors; float32 products run at 1e11 FLOP/s.

    `bfloat16` is the rate of products in 16 bits.
    `host` and `disk` are the capacities of offload tiers; None for none.
    """
    rates = {"float32": 1e11, "bfloat16": bfloat16, "float16": bfloat16}
    return Machine(
        name="tiny",
        devices_per_host=devices,
        device=Device(
            kind="cpu",
            matmul=tuple(
                MatmulRate(
                    precision=precision,
                    peak=rates[precision],
                    curve=_curve(rates[precision]),
                    attention=_curve(rates[precision] / 2),
                )
                for precision in precisions
            ),
            traffic=_curve(2e10),
            launch_seconds=5e-6,
            update_rate=4e10,
            runtime_bytes=parse_bytes(runtime),
            compiler_bytes=parse_bytes(compiler),
            tiers=(
                Tier(name="device", capacity_bytes=parse_bytes(memory)),
                *(() if host is None else (_far("host", host),)),
                *(() if disk is None else (_far("disk", disk),)),
            ),
        ),
        links=(Link(name="memory", joins=devices, latency=1e-4, rate=1e9),) if devices > 1 else (),
        source="made up for tests",
        date="2026-01-01",
    )


def tiny_plan(
    graph: Graph,
    machine: Machine,
    *,
    micro: int = 2,
    accumulation: int = 1,
    sequence: int = 16,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    precision: Precision = "float32",
    moments: MomentFormat = "float32",
    compiled: bool = False,
    clip: bool = True,
    pipeline: int = 1,
    tensor: int = 1,
    data: int = 1,
    expert: int = 1,
    context: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    sharding: tuple[int, int] = (1, 1),
    offload: Offload | None = None,
    phases: tuple[tuple[int, int], ...] | None = None,
    stages: tuple[tuple[tuple[int, int], ...], ...] | None = None,
) -> Plan:
    """A plan with the layers split into `pipeline` x `virtual_stages` model chunks of equal size.

    `stages` gives the phases of each model chunk instead, `phases` those of the only one.
    `sharding` has the degrees of parameters and of optimizer state. `offload` None offloads
    nothing.
    `recompute_layers` is the number of recomputed layers in each stage; None means all.
    """
    count = pipeline * virtual_stages
    ends = [round(index * graph.layers / count) for index in range(count + 1)]
    if phases is not None:
        stages = (phases,)
    plan = Plan.model_validate(
        {
            "graph": graph.label,
            "machine": machine.label,
            "precision": precision,
            "moments": moments,
            "compile": compiled,
            "clip": clip,
            "parallel": {
                "pipeline": pipeline,
                "tensor": tensor,
                "data": data,
                "expert": expert if expert > 1 else None,
                "context": context if context > 1 else None,
                "schedule": schedule,
                "virtual_stages": virtual_stages,
            },
            "sharding": ShardingDegrees(parameters=sharding[0], optimizer=sharding[1]),
            "offload": offload or Offload(),
            "batch": Batch(sequence=sequence, micro=micro, accumulation=accumulation),
            "stages": tuple(
                Stage(phases=each, recompute=recompute)
                for each in stages or tuple((pair,) for pair in pairwise(ends))
            ),
        }
    )
    if recompute_layers is None or recompute == "none":
        return plan
    some, none = [recompute_layers] * len(plan.stages), [0] * len(plan.stages)
    return (
        with_recompute(plan, none, some) if recompute == "selective" else with_recompute(plan, some)
    )


def _far(name: str, capacity: int | str) -> Tier:
    return Tier(name=name, capacity_bytes=parse_bytes(capacity), read=2e10, write=1e10)


def _curve(rate: float) -> Curve:
    return Curve(points=(Point(1e3, rate / 10), Point(1e9, rate)))


def _costs(cost: Callable[[int], dict[str, object]]) -> tuple[LayerCost, ...]:
    return tuple(
        LayerCost.model_validate(
            {"precision": precision, "compiled": compiled, **cost(PRECISION_BYTES[precision])}
        )
        for precision in PRECISION_BYTES
        for compiled in (False, True)
    )


def _embedding_cost(e: int, width: int, degree: int = 1) -> dict[str, object]:
    """Row look-up; with tensor parallelism its all-reduce."""
    moved = Polynomial(bs=width * e)
    op = Op(
        name="embedding", kind="memory", read_bytes=moved, written_bytes=moved, live_bytes=moved
    )
    back = op.model_copy(update={"name": "embedding backward", "live_bytes": Polynomial()})
    summed = _exchange("all_reduce", moved, degree)
    return {
        "forward": (op, *summed), "backward": (*summed, back), "saved_bytes": Polynomial(),
        "input_bytes": Polynomial(bs=8), "output_bytes": _times(moved, 1 / degree),
    }  # fmt: skip


def _block_cost(e: int, width: int, degree: int = 1) -> dict[str, object]:
    """One matrix product, then an element-wise op that saves the product for backward.

    With tensor parallelism both passes all-gather tokens before and reduce-scatter them after, and
    each rank has a part of the product's columns. In a grid the ranks of one row reduce-scatter
    those too, and all-gather their gradient.
    """
    rows, columns = grid_rows(degree), grid_columns(degree)
    own, features = width // rows, width // columns
    x = Polynomial(bs=width * e // degree)
    among: TensorAxis = "all" if columns == 1 else "tokens"
    gather = _exchange("all_gather", _times(x, rows), rows, among)
    scatter = _exchange("reduce_scatter", _times(x, rows), rows, among)
    part = _exchange("reduce_scatter", _times(x, columns), columns, "features")
    join = _exchange("all_gather", _times(x, columns), columns, "features")
    product = _product(
        e, m=Polynomial(bs=1), n=own, k=Polynomial(features), live=_times(x, columns)
    )
    act = Op(name="act", kind="memory", read_bytes=x, written_bytes=x, live_bytes=_times(x, 2))
    back = act.model_copy(update={"name": "act backward"})
    wgrad = _product(e, m=Polynomial(features), n=own, k=Polynomial(bs=1), live=_times(x, 1))
    dgrad = _product(e, m=Polynomial(bs=1), n=features, k=Polynomial(own), live=_times(x, 2))
    return {
        "forward": (*gather, product, *part, act, *scatter),
        "backward": (*gather, back, *join, wgrad, dgrad, *scatter), "saved_bytes": x,
        "input_bytes": x, "output_bytes": x,
    }  # fmt: skip


def _selective_cost(e: int, width: int, degree: int = 1) -> dict[str, object]:
    """The same block with half of its activations saved and the other half recomputed.

    Tensor-parallel ranks gather its input once more for that.
    """
    cost = _block_cost(e, width, degree)
    half = Polynomial(bs=width * e / 2 / degree)
    recomputed = Op(
        name="act recomputed", kind="memory", read_bytes=half, written_bytes=half,
        live_bytes=_times(half, 2),
    )  # fmt: skip
    gather = tuple(op for op in cost["forward"] if op.name == "all_gather")[:1]
    return cost | {"backward": (*gather, recomputed, *cost["backward"]), "saved_bytes": half}


def _head_cost(e: int, width: int, vocabulary: int, degree: int = 1) -> dict[str, object]:
    """Logits and their float32 cross-entropy; each tensor-parallel rank has a part."""
    x, logits = Polynomial(bs=width * e // degree), Polynomial(bs=vocabulary * 4)
    gather = _exchange("all_gather", _times(x, degree), degree)
    scatter = _exchange("reduce_scatter", _times(x, degree), degree)
    losses = _exchange("all_reduce", Polynomial(bs=4), degree)
    product = _product(e, m=Polynomial(bs=1), n=vocabulary, k=Polynomial(width), live=logits)
    loss = Op(
        name="loss", kind="memory", read_bytes=logits, written_bytes=Polynomial(4),
        live_bytes=Polynomial(4, bs=vocabulary * 4),
    )  # fmt: skip
    back = loss.model_copy(update={"name": "loss backward", "live_bytes": _times(logits, 2)})
    wgrad = _product(e, m=Polynomial(vocabulary), n=width, k=Polynomial(bs=1), live=logits)
    dgrad = _product(
        e, m=Polynomial(bs=1), n=width, k=Polynomial(vocabulary),
        live=Polynomial(bs=vocabulary * 4 + width * e),
    )  # fmt: skip
    return {
        "forward": (*gather, product, *losses, loss),
        "backward": (back, wgrad, dgrad, *scatter), "saved_bytes": logits,
        "input_bytes": x, "output_bytes": Polynomial(4),
    }  # fmt: skip


def _product(e: int, *, m: Polynomial, n: int, k: Polynomial, live: Polynomial) -> Op:
    """An (m, k) by (k, n) matrix product; one of m, k is a number of tokens, the other is fixed."""
    tokens, fixed = m.bs + k.bs, m.constant + k.constant
    read = Polynomial(bs=fixed * e) if m.bs == 0 else Polynomial(fixed * n * e, bs=fixed * e)
    written = Polynomial(fixed * n * e) if m.bs == 0 else Polynomial(bs=n * e)
    return Op(
        name="mm", kind="matmul", flop=Polynomial(bs=2 * tokens * fixed * n), read_bytes=read,
        written_bytes=written, live_bytes=live,
        shape=MatmulShape(batch=Polynomial(1), m=m, n=Polynomial(n), k=k),
    )  # fmt: skip


def _exchange(
    how: CollectiveKind, nbytes: Polynomial, degree: int, among: TensorAxis = "all"
) -> tuple[Op, ...]:
    """The collective of a tensor-parallel layer; none without tensor parallelism."""
    if degree == 1:
        return ()
    own = _times(nbytes, 1 / degree)
    read, written = {
        "all_gather": (own, nbytes),
        "reduce_scatter": (nbytes, own),
        "all_reduce": (nbytes, nbytes),
    }[how]
    op = Op(
        name=how, kind="collective", read_bytes=read, written_bytes=written, live_bytes=nbytes,
        collective=Collective(how, nbytes, among),
    )  # fmt: skip
    return (op,)


def _times(quantity: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(factor * part for part in quantity))


def write_documents(folder: Path) -> None:
    """Writes a few small documents, of which no two are the same, into a folder."""
    for index in range(12):
        words = [f"word{(index * 7 + at * at) % 23}" for at in range(120)]
        (folder / f"document{index}.txt").write_text(" ".join(words))
