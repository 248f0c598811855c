"""Compares a few steps under a plan with the same steps on one device, and in plain PyTorch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.data import prepare_data
from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import build_requested_model
from windlass.api.plan import Planned
from windlass.api.training.inputs.batches import make_batches
from windlass.api.training.legs import as_single_leg
from windlass.api.training.loop.hooks import Instrumentation
from windlass.api.training.train import train
from windlass.cost import predict_plan
from windlass.errors import PlanError
from windlass.planner import PlanningResult
from windlass.schema import (
    EXAMPLES_FILE,
    TOKENS_FOLDER,
    Batch,
    Plan,
    ResolvedRequest,
    Stage,
    TrainSettings,
    VerificationResult,
    optimizer_law,
)
from windlass.torch_ext import set_memory_limit
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.data import Batches, ExampleBatches, RowBatches
    from windlass.runtime import InstrumentedRun

_SMALL_STEPS, _SMALL_MICRO, _SMALL_BATCH = 3, 2, 4
"""Steps, micro-batch and batch of the run beside plain PyTorch: two micro-batches a step, and two
epochs of 6 sequences."""

_SMALL_CLIP = 0.1
"""Largest gradient norm of that run, so that it clips."""

_SMALL_DOCUMENTS = 3
"""Documents of each source in that run; windows take no notice of them, pairs of sentences do."""

_MIN_EPOCH = 2
"""Fewest sequences of an epoch that have an order."""

_WARMUP = 0.6
"""Share of warm-up steps: of three steps two, so that no two have the same learning rate."""

_EPSILON, _ROUGH_EPSILON = 1e-4, 1e-2
"""Smallest epsilon of Adam and of Lion in a verification: of plans in float64 and those that must
be equal bit for bit, and of those that are compared within the rounding of other formats.

With the usual 1e-8, a gradient that is zero up to rounding would move its weight by a full step, in
a random direction. A difference `d` between gradients `g` near zero moves weights that begin at
zero apart by `d / epsilon` of their largest element. Float32 gives d = 5e-7 max(g), and max(g) is
8e-3 in the adapters of a small model: with 1e-4, even one device in float32 was 2e-5 away from
itself in float64, twice the tolerance."""


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
    """Compares runs under one plan with a plain run on one device, which is made only once.

    Args:
        planned: the plan to verify, as `verification` returns it.
        folder: an empty folder for the runs.
        progress: called with what runs.
    """

    def __init__(self, planned: Planned, folder: Path, progress: Progress | None = None) -> None:
        self._planned, self._folder, self._progress = planned, folder, progress
        self._plain = plain_plan(planned)
        self._plain_run: InstrumentedRun | None = None

    def verify(self, fault: str | None = None) -> VerificationResult:
        """Runs the plan and compares it with a plain run, which comes before the first comparison.

        Without a fault the run stops before its last step and goes on from its checkpoint.

        Args:
            fault: name of a fault to inject, a key of `FAULTS`.

        Raises:
            WindlassError: a run failed.
        """
        from windlass.runtime import compare_to_single_device

        plain = self._run_plainly()
        request, plan = self._planned.request, self._planned.plan
        steps = request.train.steps
        restart = steps - 1 if fault is None and steps > 1 else None
        return compare_to_single_device(
            self._run(
                fault or "plan", self._planned, Instrumentation(fault=fault, restart_after=restart)
            ),
            plain,
            build_requested_model(request.model_identity),
            request.train,
            precision=plan.precision,
            moments=plan.moments,
            exact=_is_exact(plan),
        )

    def compare_to_plain_pytorch(self, schedule: TrainSettings) -> VerificationResult:
        """Compares two epochs of a plain run with plain PyTorch, which shares no code with it.

        The run takes few sequences a step, in float64: in float32 torch's own global norm is off by
        1e-5. Its text is the beginning of that of the other runs.

        Args:
            schedule: settings whose warm-up and decay are compared too.

        Raises:
            WindlassError: a run failed.
        """
        from windlass.runtime import compare_to_plain_pytorch

        planned, folder = small_plan(self._plain), self._folder / "epochs"
        settings = planned.request.train
        batches = self._excerpt(planned, folder)
        run = self._run(folder.name, planned, Instrumentation())
        self._report("running plain PyTorch")
        set_memory_limit(None)
        return compare_to_plain_pytorch(
            run,
            planned.plan,
            build_requested_model(planned.request.model_identity, seed=settings.seed),
            batches,
            settings,
            schedule=schedule,
        )

    def _excerpt(self, planned: Planned, folder: Path) -> "Batches | ExampleBatches | RowBatches":
        """Writes the data of a run of two epochs into its folder: the beginning of the others'."""
        from windlass.data import ExampleBatches, ExampleDataset, open_dataset, write_excerpt

        settings, data = planned.request.train, planned.request.data
        tokens = planned.objects.examples or prepare_data(planned.request, self._progress)
        if isinstance(tokens, ExampleDataset):
            few = tokens.excerpt(train=epoch_sequences(), held_out=2 * settings.evaluate_sequences)
            folder.mkdir(parents=True)
            few.save(folder / EXAMPLES_FILE)
            return ExampleBatches(few, batch=settings.batch, seed=settings.seed)
        excerpt = folder / TOKENS_FOLDER
        shares = data.weights or [part.tokens for part in tokens.meta.train.sources]
        # The rest fills no window, so that the rotation of an epoch shows.
        train_tokens = [
            epoch_sequences(share / sum(shares)) * settings.sequence + settings.sequence // 2
            for share in shares
        ]
        # Twice the windows that are evaluated, so that they lie apart.
        held_out = 2 * settings.evaluate_sequences * settings.sequence + 1
        write_excerpt(
            tokens, excerpt, train=train_tokens, held_out=held_out, documents=_SMALL_DOCUMENTS
        )
        return make_batches(planned, open_dataset(excerpt) or tokens)

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

    def _run_plainly(self) -> "InstrumentedRun":
        """The plain run, made when first needed."""
        if self._plain_run is None:
            _require_memory(self._plain)
            self._plain_run = self._run("one device", self._plain, Instrumentation())
        return self._plain_run

    def _run(
        self, name: str, planned: Planned, instrumentation: Instrumentation
    ) -> "InstrumentedRun":
        from windlass.runtime import InstrumentedRun

        self._report(f"running {name}")
        folder = self._folder / name.replace(" ", "-")
        run = train(planned, folder=folder, instrumentation=instrumentation)
        return InstrumentedRun(folder=run.folder, steps=tuple(run))

    def _report(self, label: str) -> None:
        if self._progress is not None:
            self._progress(label, 0, None)


def epoch_sequences(share: float = 1.0) -> int:
    """Sequences of an epoch of a source with a share of the text, in the run beside PyTorch."""
    return max(_MIN_EPOCH, round(_SMALL_STEPS * _SMALL_BATCH / 2 * share))


def _require_memory(plain: Planned) -> None:
    """Refuses a model that does not fit this machine without a plan.

    Raises:
        PlanError: the plain run needs more memory than there is.
    """
    needed, memory = plain.prediction.peaks[0].peak_bytes, plain.machine.device.memory
    if needed > memory.capacity_bytes:
        raise PlanError(
            f"the plain run that a plan is compared with keeps everything in memory, predicted "
            f"{format_bytes(needed)} of {format_bytes(memory.capacity_bytes)}; check a smaller "
            "model (`model.layers`) or a smaller `train.batch` with the same plan"
        )


def verification(planned: Planned, *, steps: int, keep: frozenset[str] = frozenset()) -> Planned:
    """The plan prepared for verification: few steps, all saved, in formats with little rounding.

    Plans for several devices run in float64 without offload, in float32 with offload, and with
    moments in float32. Plans for one device keep their precision, in which they must be equal to
    the plain run bit for bit, unless their loss is fused: its sums are ordered otherwise. Layers
    are not compiled.

    Args:
        planned: a plan for local processes of this machine.
        steps: number of steps.
        keep: those of `precision`, `moments` and `compile` that stay as they are.
    """
    planned = as_single_leg(planned)
    plan, settings = planned.plan, planned.request.train
    float64 = not plan.offloads and (plan.moments == "float32" or "moments" not in keep)
    exact = {
        "precision": "float64" if float64 else "float32", "moments": "float32", "compile": False,
    }  # fmt: skip
    if plan.parallel.devices == 1 and plan.loss is None:
        keep |= {"precision", "moments"}
    elif plan.multiplies_float8:
        # In bfloat16 a factor on the other side of a tie would hide much.
        keep -= {"precision"}
    changed = {key: exact[key] for key in exact if key not in keep}
    if plan.precision == "float8" and "precision" not in keep:
        changed["products"] = "float8"
    plan = plan.model_copy(update=changed)
    if plan.precision != "bfloat16":
        plan = plan.model_copy(update={"master_weights": None})
    is_fine = plan.precision == "float64" or _is_exact(plan)
    epsilon = _EPSILON if is_fine else _ROUGH_EPSILON
    has_epsilon = optimizer_law(plan.optimizer).epsilon is not None
    short = settings.model_copy(
        update={
            "steps": steps, "save_every": 1, "keep": steps, "evaluate_every": steps + 1,
            # A micro-batch for each replica, and one that is not full.
            "evaluate_sequences": plan.batch.micro * plan.parallel.data + 1,
            "epsilon": max(epsilon if has_epsilon else 0.0, settings.epsilon), "warmup": _WARMUP,
        }
    )  # fmt: skip
    request = planned.request.model_copy(
        update={
            "train": short,
            "precision": plan.precision,
            "moments": plan.moments,
            "master_weights": plan.master_weights is None,
        }
    )
    return with_plan(replace(planned, request=request), plan)


def _is_exact(plan: Plan) -> bool:
    """Whether a plan must equal the plain run bit for bit."""
    return plan.parallel.devices == 1 and not plan.compile and plan.loss is None


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
    """A plain plan in float64, with few steps of few sequences, which are windows of text."""
    plan, request = plain.plan, plain.request
    batch = Batch(
        sequence=plan.batch.sequence,
        micro=_SMALL_MICRO,
        accumulation=_SMALL_BATCH // _SMALL_MICRO,
    )
    formats = {"precision": "float64", "moments": "float32"}
    clip = request.train.clip and min(request.train.clip, _SMALL_CLIP)
    if plan.multiplies_float8:
        # Divisors in float32 would differ by 6e-8, and move factors to the other side of ties.
        clip, plan = None, plan.model_copy(update={"clip": False, "products": "float8"})
    train = request.train.model_copy(
        update={
            "steps": _SMALL_STEPS, "batch": _SMALL_BATCH, "sequence": plan.batch.sequence,
            "evaluate_every": _SMALL_STEPS, "evaluate_sequences": _SMALL_MICRO + 1,
            "clip": clip,
        }
    )  # fmt: skip
    data = request.data.model_copy(update={"packing": False})
    request = request.model_copy(
        update={"train": train, "data": data, "master_weights": True, **formats}
    )
    plan = plan.model_copy(update={"batch": batch, "master_weights": None, **formats})
    return with_plan(replace(plain, request=request), plan)
