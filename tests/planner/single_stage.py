"""All plans of one stage and one replica, listed for tests without the planner's own space."""

from itertools import product

from windlass.planner.recompute_layers import with_recompute_layers
from windlass.planner.space.options import divisors, is_captured, precisions
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import DEVICE_TIER, Batch, Offload, Parallelism, Plan, Recompute, Stage
from windlass.schema.request import ResolvedRequest


def single_stage_plans(asked: ResolvedRequest, graph: Graph, on: Machine) -> list[Plan]:
    """Every plan of one device that keeps the request's pins; recompute is full or none."""
    batch, sequence = asked.train.batch, asked.train.sequence
    modes: tuple[Recompute, ...] = ("none", "full") if asked.recompute_layers is None else ("full",)
    plans = [
        Plan(
            graph=graph.label,
            machine=on.label,
            parallel=Parallelism(schedule=asked.parallel.schedule or "1f1b"),
            precision=precision,
            compile=compiled,
            moments=asked.moments,
            clip=asked.train.clip is not None,
            offload=Offload(optimizer=asked.offload.optimizer or DEVICE_TIER),
            batch=Batch(sequence=sequence, micro=micro, accumulation=batch // micro),
            stages=(Stage(phases=((0, graph.layers),), recompute=mode),),
        )
        for precision, compiled, mode, micro in product(
            [asked.precision] if asked.precision else precisions(on),
            (False, True) if asked.compile is None else [asked.compile],
            [asked.recompute] if asked.recompute else modes,
            divisors(batch) if asked.batch.micro is None else [asked.batch.micro],
        )
        if is_captured(graph, precision, compiled=compiled)
    ]
    if asked.recompute_layers is None:
        return plans
    return [with_recompute_layers(plan, asked.recompute_layers) for plan in plans]
