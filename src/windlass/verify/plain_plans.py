"""The plans that a plan is compared with: plain ones, of the same steps and of a few small ones."""

from dataclasses import replace

from windlass.cost import predict_plan
from windlass.jobs import HERE, Planned, find_machine
from windlass.planner import PlanningResult
from windlass.schema import Batch, Plan, ResolvedRequest, Stage

SMALL_STEPS, SMALL_BATCH, _SMALL_MICRO = 3, 4, 2
"""Steps, batch and micro-batch of the run beside plain PyTorch: two micro-batches a step, and two
epochs of 6 sequences."""

_SMALL_CLIP = 0.1
"""Largest gradient norm of that run, so that it clips."""


def with_plan(planned: Planned, plan: Plan) -> Planned:
    """The same request under another plan, with its prediction."""
    prediction = predict_plan(plan, planned.graph, planned.machine)
    return replace(planned, result=PlanningResult(plan=plan, prediction=prediction))


def plain_plan(planned: Planned) -> Planned:
    """The same steps as plainly as can be, whatever is pinned.

    They run on one device, eagerly, with everything in device memory, without phases, offload or
    recompute.
    """
    plan, request = planned.plan, planned.request
    machine = find_machine(HERE)
    plain = Plan(
        graph=plan.graph,
        machine=machine.label,
        model=plan.model,
        precision=plan.precision,
        products=plan.products,
        optimizer=plan.optimizer,
        ema=plan.ema,
        master_weights=plan.master_weights,
        moments=plan.moments,
        deterministic=plan.deterministic,
        # Another kernel rounds otherwise; the run in plain PyTorch computes it in its own way.
        attention=plan.attention,
        clip=plan.clip,
        batch=Batch(
            sequence=plan.batch.sequence,
            micro=plan.batch.micro,
            accumulation=plan.batch.accumulation * plan.parallel.data,
        ),
        stages=(Stage(phases=((0, planned.graph.layers),)),),
    )
    kept = {name: getattr(request, name) for name in ("model", "sparsity", "lora", "data", "train")}
    pinned = {
        "precision": plan.precision, "moments": plan.moments, "compile": False,
        "deterministic": bool(plan.deterministic), "attention": plan.attention,
        "master_weights": plan.master_weights is None,
    }  # fmt: skip
    resolved = ResolvedRequest(**kept, **pinned)
    return with_plan(replace(planned, request=resolved, machine=machine), plain)


def small_plan(plain: Planned) -> Planned:
    """A plain plan in float64, with few steps of few sequences.

    Args:
        plain: a plan for one device, eager and in memory.
    """
    plan, request = plain.plan, plain.request
    batch = Batch(
        sequence=plan.batch.sequence,
        micro=_SMALL_MICRO,
        accumulation=SMALL_BATCH // _SMALL_MICRO,
    )
    formats = {"precision": "float64", "moments": "float32"}
    clip = request.train.clip and min(request.train.clip, _SMALL_CLIP)
    if plan.multiplies_float8:
        # Divisors in float32 would differ by 6e-8, and move factors to the other side of ties.
        clip, plan = None, plan.model_copy(update={"clip": False, "products": "float8"})
    train = request.train.model_copy(
        update={
            "steps": SMALL_STEPS, "batch": SMALL_BATCH, "sequence": plan.batch.sequence,
            "evaluate_every": SMALL_STEPS - 1, "evaluate_sequences": _SMALL_MICRO + 1, "clip": clip,
        }
    )  # fmt: skip
    request = request.model_copy(update={"train": train, "master_weights": True, **formats})
    plan = plan.model_copy(update={"batch": batch, "master_weights": None, **formats})
    return with_plan(replace(plain, request=request), plan)
