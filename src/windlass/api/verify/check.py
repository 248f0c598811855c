"""Compares a few steps under a plan, on local processes, with the same steps on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import build_requested_model
from windlass.api.plan import Planned
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.train import train
from windlass.cost import predict_plan
from windlass.planner import PlanningResult
from windlass.schema import (
    Batch,
    Offload,
    Parallelism,
    Plan,
    ResolvedRequest,
    ShardingDegrees,
    Stage,
    VerificationResult,
)

if TYPE_CHECKING:
    from windlass.runtime import InstrumentedRun

_EPSILON = 1e-4
"""Smallest epsilon of Adam in a verification. With the usual 1e-8, a gradient that is zero up to
rounding would move its weight by a full step, in a random direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """The verification of a plan with one injected fault."""

    fault: str
    """Name of the fault."""
    description: str
    """The fault in words."""
    layer: int | None
    """The layer with the fault; None if it concerns no single layer."""
    result: VerificationResult

    @property
    def detected(self) -> bool:
        """Whether the verification failed, and named the right layer."""
        first = self.result.first_mismatch
        return first is not None and self.layer in (None, first.layer)


class Verifier:
    """Compares runs under one plan with a run on one device, which is made only once.

    Args:
        planned: the plan to verify, as `verification` returns it.
        folder: an empty folder for the runs.
        progress: called with what runs.
    """

    def __init__(self, planned: Planned, folder: Path, progress: Progress | None = None) -> None:
        self._planned, self._folder, self._progress = planned, folder, progress
        self._single_device = on_single_device(planned)
        self._reference: InstrumentedRun | None = None

    def verify(self, fault: str | None = None) -> VerificationResult:
        """Runs the plan and compares it with one device, which runs before the first comparison.

        Args:
            fault: name of a fault to inject, a key of `FAULTS`.

        Raises:
            WindlassError: a run failed.
        """
        from windlass.runtime import compare_to_single_device

        if self._reference is None:
            self._reference = self._run("one device", self._single_device, Instrumentation())
        request, plan = self._planned.request, self._planned.plan
        name = fault or "plan"
        return compare_to_single_device(
            self._run(name, self._planned, Instrumentation(fault=fault)),
            self._reference,
            build_requested_model(request.model),
            request.train,
            precision=plan.precision,
            moments=plan.moments,
        )

    def inject_faults(self) -> Iterator[FaultResult]:
        """Yields the verification of the plan with each fault that can occur in it."""
        from windlass.runtime import FAULTS, faulty_layer

        plan, graph = self._planned.plan, self._planned.graph
        for name, fault in FAULTS.items():
            if fault.is_possible(plan, graph):
                layer = faulty_layer(plan) if fault.single_layer else None
                yield FaultResult(
                    fault=name, description=fault.description, layer=layer, result=self.verify(name)
                )

    def skipped_faults(self) -> tuple[tuple[str, str], ...]:
        """Description and requirement of each fault that cannot occur in the plan."""
        from windlass.runtime import FAULTS

        plan, graph = self._planned.plan, self._planned.graph
        return tuple(
            (fault.description, fault.requirement)
            for fault in FAULTS.values()
            if not fault.is_possible(plan, graph)
        )

    def _run(
        self, name: str, planned: Planned, instrumentation: Instrumentation
    ) -> "InstrumentedRun":
        from windlass.runtime import InstrumentedRun

        if self._progress is not None:
            self._progress(f"running {name}", 0, None)
        folder = self._folder / name.replace(" ", "-")
        run = train(planned, folder=folder, instrumentation=instrumentation)
        return InstrumentedRun(folder=run.folder, steps=tuple(run))


def verification(planned: Planned, *, steps: int, keep: frozenset[str] = frozenset()) -> Planned:
    """The plan prepared for verification: few steps, all saved, in formats with little rounding.

    Plans without offload run in float64, those with offload in float32. Moments are in float32, and
    layers are not compiled.

    Args:
        planned: a plan for several devices.
        steps: number of steps.
        keep: those of `precision`, `moments` and `compile` that stay as they are.
    """
    plan, settings = planned.plan, planned.request.train
    float64 = not plan.offloads and (plan.moments == "float32" or "moments" not in keep)
    exact = {
        "precision": "float64" if float64 else "float32", "moments": "float32", "compile": False,
    }  # fmt: skip
    plan = plan.model_copy(update={key: exact[key] for key in exact if key not in keep})
    short = settings.model_copy(
        update={
            "steps": steps, "save_every": 1, "keep": steps, "evaluate_every": steps + 1,
            "evaluate_sequences": 0, "epsilon": max(_EPSILON, settings.epsilon),
            "warmup": 0.0,
        }
    )  # fmt: skip
    request = planned.request.model_copy(
        update={"train": short, "precision": plan.precision, "moments": plan.moments}
    )
    return with_plan(replace(planned, request=request), plan)


def with_plan(planned: Planned, plan: Plan) -> Planned:
    """The same request under another plan, with its prediction."""
    prediction = predict_plan(plan, planned.graph, planned.machine)
    return replace(planned, result=PlanningResult(plan=plan, prediction=prediction))


def on_single_device(planned: Planned) -> Planned:
    """The same steps on one device, with everything in device memory and without recompute."""
    plan, request = planned.plan, planned.request
    machine = find_machine(HERE)
    batch = Batch(
        sequence=plan.batch.sequence,
        micro=plan.batch.micro,
        accumulation=plan.batch.accumulation * plan.parallel.data,
    )
    plan = plan.model_copy(
        update={
            "machine": machine.label, "parallel": Parallelism(), "sharding": ShardingDegrees(),
            "offload": Offload(), "batch": batch,
            "stages": (Stage(phases=((0, planned.graph.layers),)),),
        }
    )  # fmt: skip
    alone = request.model_dump(exclude={"parallel", "sharding", "memory"})
    request = ResolvedRequest.model_validate(alone)
    return with_plan(replace(planned, request=request, machine=machine), plan)
