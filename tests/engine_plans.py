"""Plans of published models on H100 hosts, made by hand: no search is needed to say one."""

from functools import cache
from itertools import product

from windlass.engines import even_ranges, plan_facts
from windlass.engines.flat_plan import Fact
from windlass.jobs import NO_OBJECTS, capture, exported_config, find_machine
from windlass.models import TransformerConfig
from windlass.planner import resolve_defaults
from windlass.schema import (
    Batch,
    Graph,
    Machine,
    ModelIdentity,
    Parallelism,
    Plan,
    Request,
    ShardingDegrees,
    Stage,
    TrainSettings,
)


@cache
def graph_of(model: str) -> Graph:
    """The graph of a model, as Windlass's own layers compute it."""
    return capture(ModelIdentity(name=model), NO_OBJECTS, None)


@cache
def config_of(model: str) -> TransformerConfig:
    """The sizes of a model."""
    config = exported_config(ModelIdentity(name=model))
    assert isinstance(config, TransformerConfig)
    return config


def machine_of(hosts: int) -> Machine:
    """Hosts with eight H100s each."""
    return find_machine(f"dgx-h100:{hosts}")


@cache
def train_of(model: str) -> TrainSettings:
    """The training that a request for a model leaves to its defaults."""
    request = Request.resolve(overrides=(f"model.name={model}", "train.batch=64"))
    return resolve_defaults(request, graph_of(model), machine_of(1))[0].train


def facts_of(plan: Plan) -> dict[str, Fact]:
    """What a plan says."""
    model = str(plan.model and plan.model.name)
    return plan_facts(plan, train_of(model), config_of(model))


def make_plan(
    model: str = "llama3-8b",
    *,
    stack: str = "torchtitan",
    hosts: int = 1,
    recompute: str = "none",
    count: int | None = None,
    sharding: tuple[int, int] = (1, 1),
    reshard: bool = False,
    micro: int = 1,
    accumulation: int = 8,
    precision: str = "bfloat16",
    **degrees: object,
) -> Plan:
    """A plan whose replicas fill the hosts."""
    parallel = {"pipeline": 1, "tensor": 1, **degrees}
    each = parallel["pipeline"] * parallel["tensor"] * (parallel.get("context") or 1)
    machine, graph = machine_of(hosts), graph_of(model)
    parallel["data"] = machine.devices // each
    chunks = parallel["pipeline"] * parallel.get("virtual_stages", 1)
    stages = [
        Stage.model_validate({"phases": (span,), "recompute": recompute, "recompute_layers": count})
        for span in even_ranges(graph.layers, chunks)
    ]
    return Plan(
        graph=graph.label, machine=machine.label, stack=stack, model=ModelIdentity(name=model),
        precision=precision, parallel=Parallelism.model_validate(parallel),
        sharding=ShardingDegrees(
            parameters=sharding[0], optimizer=sharding[1], reshard=reshard or None
        ),
        batch=Batch(sequence=2048, micro=micro, accumulation=accumulation), stages=tuple(stages),
    )  # fmt: skip


def sharded_plans(models: tuple[str, ...], *, stack: str, pipelines: bool = True) -> list[Plan]:
    """Plans that shard parameters (FSDP), over models, hosts and degrees."""
    plans = []
    for model, hosts, tensor in product(models, (1, 4), (1, 2)):
        replicas = 8 * hosts // tensor
        plans.append(
            make_plan(
                model, stack=stack, hosts=hosts, tensor=tensor, sharding=(replicas, replicas),
                reshard=tensor == 1, recompute="full" if hosts == 1 else "selective",
            )
        )  # fmt: skip
        if pipelines:
            half = replicas // 2
            plans.append(
                make_plan(
                    model, stack=stack, hosts=hosts, tensor=tensor, pipeline=2,
                    sharding=(half, half), virtual_stages=1 if tensor == 1 else 2,
                    schedule="1f1b" if tensor == 1 else "interleaved",
                )
            )  # fmt: skip
    return plans


def optimizer_plans(models: tuple[str, ...], *, stack: str) -> list[Plan]:
    """Plans that shard optimizer state (ZeRO-1), over models, hosts, degrees and recompute."""
    plans = []
    for model, hosts, pipeline, tensor in product(models, (1, 4), (1, 2), (1, 2)):
        replicas = 8 * hosts // tensor // pipeline
        is_chunked = pipeline > 1 and tensor > 1
        plans.append(
            make_plan(
                model, stack=stack, hosts=hosts, pipeline=pipeline, tensor=tensor,
                sharding=(1, replicas if pipeline == 1 else replicas // 2),
                virtual_stages=2 if is_chunked else 1,
                schedule="interleaved" if is_chunked else "1f1b",
                recompute="full" if tensor == 1 else "none",
                count=3 if pipeline == 2 and tensor == 1 else None,
            )
        )  # fmt: skip
    return plans


def flat_plans(engine: str) -> list[Plan]:
    """Plans without a pipeline, over models, hosts, micro-batches and sharding."""
    plans = []
    for model, hosts, micro in product(("llama3-8b", "qwen3-30b-a3b"), (1, 4), (1, 2)):
        for tensor, share in ((1, 1), (1, 2), (2, 1)) if engine != "deepspeed" else ((1, 1),) * 3:
            degree = 8 * hosts // tensor // share
            plans.append(
                make_plan(
                    model, stack=engine, hosts=hosts, tensor=tensor, micro=micro, reshard=True,
                    sharding=(degree, degree), accumulation=2 + len(plans),
                    recompute="full" if micro == 2 else "none",
                )
            )  # fmt: skip
    return plans


def engine_plans(engine: str) -> list[Plan]:
    """Twenty plans or more that an engine can say, dense and with experts, on 1 and 4 hosts."""
    dense = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b")
    if engine == "torchtitan":
        wide = make_plan(stack=engine, hosts=4, context=2, tensor=2, sharding=(8, 8))
        expert = make_plan("qwen3-30b-a3b", stack=engine, expert=8, sharding=(8, 8), reshard=True)
        return [*sharded_plans(dense, stack=engine), wide, expert]
    if engine == "automodel":
        return sharded_plans(dense, stack=engine)
    if engine in ("accelerate", "transformers", "deepspeed"):
        return flat_plans(engine)
    models = ("llama3-8b", "gpt3-13b", "mixtral-8x7b")
    expert = make_plan("mixtral-8x7b", stack=engine, expert=4, sharding=(1, 8))
    return [*optimizer_plans(models, stack=engine), expert]


def refused_plans(engine: str) -> list[tuple[str, Plan]]:
    """Plans that an engine cannot say, each with the field that it has no word for."""
    if engine == "torchtitan":
        return [
            ("model.name", make_plan("gpt3-13b", sharding=(8, 8))),
            ("sharding.kind", make_plan(sharding=(1, 8))),
            ("recompute_layers", make_plan(sharding=(8, 8), recompute="full", count=4)),
            ("precision", make_plan(sharding=(8, 8), precision="float8")),
            ("sharding.of_context", make_plan(context=2)),
            ("parallel.schedule", make_plan(pipeline=2, schedule="zero-bubble")),
        ]
    if engine == "automodel":
        return [
            ("sharding.kind", make_plan(sharding=(1, 8))),
            ("recompute_layers", make_plan(sharding=(8, 8), recompute="full", count=4)),
            ("precision", make_plan(sharding=(8, 8), precision="float16")),
            ("sharding.of_context", make_plan(context=2)),
            ("parallel.schedule", make_plan(pipeline=2, schedule="zero-bubble")),
        ]
    if engine in ("accelerate", "transformers", "deepspeed"):
        return [
            ("parallel.pipeline", make_plan(pipeline=2, sharding=(4, 4), reshard=True)),
            ("recompute", make_plan(sharding=(8, 8), reshard=True, recompute="selective")),
            ("recompute_layers", make_plan(sharding=(8, 8), recompute="full", count=4)),
            ("precision", make_plan(sharding=(8, 8), precision="float8")),
            (
                ("parallel.expert", make_plan("mixtral-8x7b", expert=4, sharding=(8, 8)))
                if engine == "accelerate"
                else ("sharding.resharded", make_plan(sharding=(8, 8)))
            ),
        ]
    part = make_plan(pipeline=2, recompute="full", count=4)
    first = part.stages[0].model_copy(update={"recompute_layers": 2})
    return [
        ("sharding.kind", make_plan(sharding=(8, 8))),
        ("parallel.schedule", make_plan(pipeline=2, schedule="gpipe")),
        ("recompute_partial", make_plan(recompute="selective", count=4)),
        ("recompute_layers", part.model_copy(update={"stages": (first, *part.stages[1:])})),
        (
            ("model.attention_softcap", make_plan("gemma2-2b"))
            if engine == "megatron-lm"
            else ("precision", make_plan(precision="float64"))
        ),
        ("moments", make_plan().model_copy(update={"moments": "int8"})),
    ]
