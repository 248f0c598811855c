"""`check` and `rehearse`: verify that a plan computes what a plain run computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType
from rich.text import Text

from windlass.answer import Answer, Bullets
from windlass.errors import RequestError
from windlass.flags import Flag, OnMachine, Watch
from windlass.jobs import (
    SEARCHED_PLAN,
    Model,
    Planned,
    PlanOptions,
    Progress,
    build_request,
    load_plan,
    plan,
)
from windlass.report import (
    InjectedFaultRow,
    describe_plan,
    describe_verdict,
    injected_faults_table,
    verification_table,
)
from windlass.schema import Request, VerificationResult, fact_table_html
from windlass.verify import (
    FaultResult,
    ProofScope,
    Verifier,
    downscale_plan,
    proof_steps,
    rehearsal,
    rehearse_as_is,
    verification,
)

VERIFICATION_STEPS = 3
"""Optimizer steps of a verification: the first has no moments yet, the second has, and one more."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Answer):
    """A few steps under a plan, compared with plain runs; true in a condition if they are equal."""

    planned: Planned
    """What was run, with what was made smaller in its notes."""
    plain: VerificationResult
    """Compared with a plain run on one device."""
    pytorch: VerificationResult
    """Compared with plain PyTorch, which shares no data, loss or optimizer code."""
    scope: ProofScope
    """Which events of the run these steps held, and what was not compared."""
    changes: tuple[str, ...] = ()
    """What was made smaller to run here, a sentence each."""
    faults: tuple[FaultResult, ...] = ()
    """The verification with each injected fault."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Description and requirement of each fault that the plan cannot have."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether both differ nowhere by more than rounding."""
        return self.plain.passed and self.pytorch.passed

    @property
    def detected(self) -> int:
        """Number of injected faults that were found."""
        return sum(fault.detected for fault in self.faults)

    @property
    def exit_code(self) -> int:
        """1 if something differs, or a fault was not found."""
        return int(not self.passed or self.detected < len(self.faults))

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<Check of {self.planned.plan!r}: {self.plain!r}, plain PyTorch {self.pytorch!r}>"

    def _repr_html_(self) -> str:
        notes = {str(i): note for i, note in enumerate(self.planned.notes, start=1)}
        heading = fact_table_html(repr(self.planned.plan), notes)
        return heading + self.plain._repr_html_() + self.pytorch._repr_html_()

    def json_tree(self) -> object:
        """What was run, both comparisons, and the faults."""
        return {
            "equal": self.passed, "plan": self.planned.plan, "changed": self.changes,
            "verification": self.plain, "plain_pytorch": self.pytorch, "faults": self.faults,
            "detected": self.detected, "events": self.scope.events,
            "not_compared": self.scope.not_compared,
        }  # fmt: skip

    def lines(self) -> Iterator[RenderableType]:
        """Plan, both comparisons, what they held, and the faults."""
        graph = self.planned.graph
        yield Text.assemble(("plan", "bold"), "  ", describe_plan(self.planned.plan, graph))
        if self.changes:
            yield "made smaller to run here, with the same structure"
            yield Bullets(self.changes)
        data = "a short text" if graph.examples is None else f"a few {graph.examples.noun}"
        reference = f"plain PyTorch in two epochs of {data}"
        yield verification_table(self.plain)
        yield Text(describe_verdict(self.plain), style="bold")
        yield verification_table(self.pytorch)
        yield Text(describe_verdict(self.pytorch, reference), style="bold")
        events = ", ".join(f"{name} x{count}" for name, count in self.scope.events.items())
        yield f"in the compared steps: {events}"
        yield "not compared"
        yield Bullets(self.scope.not_compared)
        if self.faults:
            yield injected_faults_table(
                InjectedFaultRow(each.description, each.layer, each.result, each.detected)
                for each in self.faults
            )
            found = f"{self.detected} of {len(self.faults)} injected faults detected"
            yield Text(found, style="bold")
            for description, requirement in self.skipped:
                yield f"  skipped: {description}, which needs {requirement}"


def check(
    model: Model = None,
    /,
    *overrides: str,
    options: PlanOptions = SEARCHED_PLAN,
    faults: Flag = False,
    steps: Annotated[int | None, Parameter(parse=False)] = None,
    progress: Watch = None,
) -> Check:
    """Train a few steps under a plan, plainly on one device, and in plain PyTorch, and compare.

    A plan for several devices runs on as many local processes. It stops before its last step and
    goes on from its checkpoint. The plain run is on one device, eager, in memory, without phases,
    offload or recompute. Losses, gradient norms, every layer's output and input gradient, every
    weight gradient, every weight and the held-out loss are compared, in float64 where possible,
    and bit for bit for a plan of one device. Plain PyTorch shares no data, loss or optimizer code;
    the steps pass twice through a part of the text. The exit code is 0 if everything is equal, and
    1 if not.

    For example: `windlass check gpt-tiny parallel.pipeline=2 parallel.data=2`.

    Args:
        model: A name (`windlass models` lists them), `hf:DIR`, your own `file.py:function`, or the
            TOML file of a plan.
        overrides: `key=value`, such as `parallel.pipeline=2`, `phases=12` or `train.steps=5`;
            `windlass keys` lists all.
        options: Device memory budget, request file, and a plan file in place of a search; if the
            plan is too large for this machine, a downscaled one of the same structure is checked.
        faults: Also inject faults, and check that each is detected and its layer named.
        steps: Optimizer steps; as many as all that is scheduled needs to happen twice if not given.
        progress: Called with what runs.

    Raises:
        WindlassError: what is wrong with the request, or a run failed.
    """
    if isinstance(model, Planned):
        steps = verification_steps(model.request) if steps is None else steps
        return verified(model, (), steps=steps, faults=faults, progress=progress)
    path = options.plan
    if path is None and isinstance(model, str) and model.endswith(".toml"):
        path, model = Path(model), None
    request = _shortened(build_request(model, overrides, options), overrides, steps)
    changes: tuple[str, ...] = ()
    if path is None:
        planned = plan(request, progress=progress)
    else:
        planned, changes = _from_file(path, request, progress)
    steps = planned.request.train.steps
    return verified(
        planned, changes, steps=steps, faults=faults, notes=planned.notes, progress=progress
    )


def rehearse(
    model: Model = None,
    /,
    *overrides: str,
    machine: OnMachine = None,
    options: PlanOptions = SEARCHED_PLAN,
    faults: Flag = False,
    progress: Watch = None,
) -> Check:
    """Run a plan for a large machine downscaled, on local processes, and verify it as `check` does.

    Pipeline stages, tensor-parallel ranks, replicas, shards, phases, the schedule and recompute
    are kept; widths become tiny, and degrees are divided until 8 processes are enough. All
    communication is real. A plan that does not fit the machine is rehearsed too, with a note.

    For example: `windlass rehearse gpt3-175b --on dgx-h100:16 parallel.pipeline=8`.

    Args:
        model: A name (`windlass models` lists them).
        overrides: `key=value`, such as `parallel.pipeline=8` or `sharding.parameters=4`;
            `windlass keys` lists all.
        machine: The machine that the plan is for; `here` if not given.
        options: Device memory budget, request file, and a plan file in place of a search.
        faults: Also inject faults, and check that each is detected.
        progress: Called with what runs.

    Raises:
        WindlassError: what is wrong with the request, or a run failed.
    """
    request = build_request(model, overrides, options, machine=machine)
    misfit: tuple[str, ...] = ()
    if options.plan is not None:
        full_plan, request = load_plan(options.plan, request)
    else:
        full_plan, misfit = rehearsal(request, progress=progress)
    steps = verification_steps(request)
    train = request.train.model_copy(update={"steps": steps})
    request = request.model_copy(update={"train": train})
    small, changes = downscale_plan(full_plan, request, progress=progress)
    return verified(small, (*misfit, *changes), steps=steps, faults=faults, progress=progress)


def verified(
    planned: Planned,
    changes: tuple[str, ...],
    *,
    steps: int,
    faults: bool = False,
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Check:
    """Verifies a plan on local processes.

    Args:
        planned: a plan for this machine.
        changes: what was made smaller, a sentence each.
        steps: optimizer steps.
        faults: whether to inject faults too, where everything is equal.
        notes: what a user should know first.
        progress: called with what runs.

    Raises:
        WindlassError: a run failed.
    """
    if not planned.objects.is_rebuildable or planned.objects.examples is not None:
        raise RequestError(
            "a check compares processes, and objects that were passed live in this one; put the "
            "function that builds the model into a file that is imported, and name the text"
        )
    ready = verified_numerics(planned, steps=steps)
    with TemporaryDirectory() as folder:
        verifier = Verifier(ready, Path(folder), progress)
        if faults:
            verifier.require_instructions()
        plain = verifier.verify()
        pytorch = verifier.compare_to_plain_pytorch(planned)
        scope = verifier.scope(planned)
        passed = plain.passed and pytorch.passed
        injected = tuple(verifier.inject_faults()) if faults and passed else ()
    return Check(
        planned=ready, plain=plain, pytorch=pytorch, scope=scope, changes=changes,
        faults=injected, skipped=verifier.skipped_faults() if injected else (), notes=notes,
    )  # fmt: skip


def verification_steps(request: Request) -> int:
    """Steps of a check, in which all that a request schedules can happen twice."""
    return proof_steps(request, VERIFICATION_STEPS)


def verified_numerics(planned: Planned, *, steps: int) -> Planned:
    """A plan prepared for its verification; numerics that the request fixes stay as they are.

    Args:
        planned: a plan for this machine.
        steps: optimizer steps.
    """
    request = planned.request
    pinned = {key for key in ("precision", "compile") if getattr(request, key) is not None}
    pinned |= {"moments"} if request.moments != "float32" else set()
    return verification(planned, steps=steps, keep=frozenset(pinned))


def _from_file(
    path: Path, request: Request, progress: Progress | None
) -> tuple[Planned, tuple[str, ...]]:
    """A plan from a file, downscaled if this machine needs it; and the changes, a sentence each."""
    read, request = load_plan(path, request)
    planned = rehearse_as_is(read, request, progress=progress)
    if planned is not None:
        return planned, ()
    return downscale_plan(read, request, progress=progress)


def _shortened(request: Request, overrides: tuple[str, ...], steps: int | None) -> Request:
    """The request with the steps of a check, unless they are given or an override sets them."""
    explicit = any(override.startswith("train.steps=") for override in overrides)
    named = request.train.steps if explicit else None
    count = steps or named or verification_steps(request)
    changes = {"steps": count, "evaluate_every": count + 1, "save_every": count + 1}
    return request.model_copy(update={"train": request.train.model_copy(update=changes)})
