"""Plans of the torch stack for a `RankPool`: of some degrees, and random ones."""

import random
from typing import Any

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, RankPool, divisors, parallel_degrees
from windlass.schema.plan import Plan


def torch_plan(
    pool: RankPool,
    *,
    micro: int = 1,
    data: int = 1,
    reshard: bool = False,
    **degrees: Any,  # noqa: ANN401  handed on to the factory
) -> Plan:
    """A plan for the torch stack, with `BATCH` samples per step."""
    plan = tiny_plan(
        pool.graph, MACHINE, micro=micro, data=data, accumulation=BATCH // data // micro,
        **{"sequence": pool.sequence, "precision": "float64", **degrees},
    )  # fmt: skip
    sharding = plan.sharding.model_copy(update={"reshard": True if reshard else None})
    return plan.model_copy(update={"stack": "torch", "sharding": sharding})


def random_plan(draw: random.Random, pool: RankPool, processes: tuple[int, ...] = (2, 4)) -> Plan:
    """Any plan that the stack's `can` admits, for so many processes."""
    degrees = tuple(pool.graph.tensor_shards)
    pipeline, tensor, data = draw.choice(list(parallel_degrees(draw.choice(processes), degrees)))
    sharded = draw.choice(divisors(data))
    micro = draw.choice([m for m in (1, 2, 4) if BATCH // data % m == 0])
    accumulation = BATCH // data // micro
    schedule, chunks = draw.choice(("1f1b", "gpipe")), 1
    if pipeline == 2 and accumulation % pipeline == 0 and draw.random() < 0.5:
        schedule, chunks = "interleaved", 2
    plan = tiny_plan(
        pool.graph, MACHINE, pipeline=pipeline, tensor=tensor, data=data, micro=micro,
        accumulation=accumulation, sequence=pool.sequence, sharding=(sharded, sharded),
        schedule=schedule, virtual_stages=chunks,
        recompute=draw.choice(("none", "full", "selective")),
        recompute_layers=draw.choice((None, 1, 2)),
        precision=draw.choice(("float64", "float64", "float32")),
    )  # fmt: skip
    reshard = True if sharded > 1 and draw.random() < 0.5 else None
    sharding = plan.sharding.model_copy(update={"reshard": reshard})
    return plan.model_copy(update={"stack": "torch", "sharding": sharding})


def describe(plan: Plan) -> str:
    """A plan in few words."""
    parallel, shard = plan.parallel, plan.sharding.parameters
    parts = [f"pp {parallel.pipeline}", f"replicas {parallel.data // shard}", f"shards {shard}"]
    parts += [f"tp {parallel.tensor}", f"{plan.batch.accumulation} x {plan.batch.micro}"]
    parts += [parallel.schedule] if parallel.pipeline > 1 else []
    parts += ["reshard"] if plan.sharding.reshard else []
    parts += [plan.recompute] if plan.recompute != "none" else []
    return ", ".join((*parts, plan.precision))
