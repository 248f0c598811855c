"""Checking: a few steps under a plan on local processes, against the same steps on one device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import build_requested_model
from windlass.api.plan import Planned
from windlass.api.training.instrumentation import Instrumentation
from windlass.api.training.train import train
from windlass.cost.predict import predict
from windlass.planner.result import PlanningResult
from windlass.schema.plan import Batch, Offload, Parallelism, Plan, ShardingDegrees, Stage
from windlass.schema.request import Request
from windlass.schema.verification import VerificationResult

if TYPE_CHECKING:
    from windlass.runtime.verify.compare_runs import InstrumentedRun

_EPSILON = 1e-4
"""Of Adam. With its usual 1e-8 a gradient that is zero but for rounding would move its weight by a
whole step, in a direction that is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """What a proof made of one mistake."""

    fault: str
    description: str
    layer: int | None
    """That made it; None if no one layer did."""
    result: VerificationResult

    @property
    def detected(self) -> bool:
        """Whether it was found, and its layer named."""
        first = self.result.first_mismatch
        return first is not None and self.layer in (None, first.layer)


class Verifier:
    """Holds one plan against one device, whose run serves for all that is asked.

    Args:
        planned: of the plan in question, as `proving` gives it.
        folder: for runs; an empty one.
        progress: told what runs.
    """

    def __init__(self, planned: Planned, folder: Path, progress: Progress | None = None) -> None:
        self._planned, self._folder, self._progress = planned, folder, progress
        self._alone = on_single_device(planned)
        self._reference: InstrumentedRun | None = None

    def verify(self, fault: str | None = None) -> VerificationResult:
        """Runs the plan and compares; the first time, runs it on one device too.

        Args:
            fault: a mistake to make, of `FAULTS`.

        Raises:
            WindlassError: a run failed.
        """
        from windlass.runtime.verify.compare_runs import compare_to_single_device

        if self._reference is None:
            self._reference = self._ran("one device", self._alone, Instrumentation())
        request, plan = self._planned.request, self._planned.plan
        name = fault or "plan"
        return compare_to_single_device(
            self._ran(name, self._planned, Instrumentation(fault=fault)),
            self._reference,
            build_requested_model(request.model),
            request.train,
            precision=plan.precision,
            moments=plan.moments,
        )

    def inject_faults(self) -> Iterator[FaultResult]:
        """Makes each mistake that the plan can make, one after the other."""
        from windlass.runtime.verify.fault_injection import FAULTS, faulty_layer

        plan, graph = self._planned.plan, self._planned.graph
        for name, fault in FAULTS.items():
            if fault.is_possible(plan, graph):
                layer = faulty_layer(plan) if fault.single_layer else None
                yield FaultResult(
                    fault=name, description=fault.description, layer=layer, result=self.verify(name)
                )

    def skipped_faults(self) -> tuple[tuple[str, str], ...]:
        """Mistakes that the plan cannot make, and what it lacks for them."""
        from windlass.runtime.verify.fault_injection import FAULTS

        plan, graph = self._planned.plan, self._planned.graph
        return tuple((f.description, f.requirement) for f in FAULTS.values() if not f.is_possible(plan, graph))

    def _ran(self, name: str, planned: Planned, scrutiny: Instrumentation) -> "InstrumentedRun":
        from windlass.runtime.verify.compare_runs import InstrumentedRun

        if self._progress is not None:
            self._progress(f"running {name}", 0, None)
        run = train(planned, folder=self._folder / name.replace(" ", "-"), instrumentation=scrutiny)
        return InstrumentedRun(folder=run.folder, steps=tuple(run))


def verification(planned: Planned, *, steps: int, keep: frozenset[str] = frozenset()) -> Planned:
    """The same made ready for a proof: few steps, each saved; numbers in which rounding is small.

    Near plans run in float64, those with homes elsewhere in float32; moments in float32, and layers
    are not compiled.

    Args:
        planned: of several devices.
        steps: how many.
        kept: of `precision`, `moments` and `compile`, those that stay as they are.
    """
    plan, train_request = planned.plan, planned.request.train
    wide = not plan.offloads and (plan.moments == "float32" or "moments" not in keep)
    clear = {"precision": "float64" if wide else "float32", "moments": "float32", "compile": False}
    plan = plan.model_copy(update={k: value for k, value in clear.items() if k not in keep})
    never = steps + 1
    short = train_request.model_copy(
        update={
            "steps": steps, "save_every": 1, "keep": steps, "evaluate_every": never,
            "evaluate_sequences": 0, "epsilon": max(_EPSILON, train_request.epsilon),
            "warmup": 0.0,
        }
    )  # fmt: skip
    request = planned.request.model_copy(
        update={"train": short, "precision": plan.precision, "moments": plan.moments}
    )
    return with_plan(replace(planned, request=request), plan)


def with_plan(planned: Planned, plan: Plan) -> Planned:
    """The same under another plan, predicted."""
    prediction = predict(plan, planned.graph, planned.machine)
    return replace(planned, result=PlanningResult(plan=plan, prediction=prediction))


def on_single_device(planned: Planned) -> Planned:
    """The same steps on one device, all of it near and nothing computed twice."""
    plan, request = planned.plan, planned.request
    machine = find_machine(HERE)
    batch = Batch(
        sequence=plan.batch.sequence,
        micro=plan.batch.micro,
        accumulation=plan.batch.accumulation * plan.parallel.data,
    )
    whole = plan.model_copy(
        update={
            "machine": machine.label, "parallel": Parallelism(), "sharding": ShardingDegrees(), "offload": Offload(),
            "batch": batch,
            "stages": (Stage(phases=((0, planned.graph.layers),)),),
        }
    )  # fmt: skip
    request = Request.model_validate(request.model_dump(exclude={"parallel", "sharding", "memory"}))
    return with_plan(replace(planned, request=request, machine=machine), whole)
