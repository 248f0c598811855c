"""Compares a few steps under a plan with the same steps on one device, and in plain PyTorch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import PlanError
from windlass.jobs import Planned, Progress, build_requested_model, prepare_data
from windlass.schema import EXAMPLES_FILE, TOKENS_FOLDER, Plan, VerificationResult, optimizer_law
from windlass.torch_ext import set_memory_limit
from windlass.training import Instrumentation, as_single_leg, make_batches, train
from windlass.units import format_bytes
from windlass.verify.plain_plans import SMALL_BATCH, SMALL_STEPS, plain_plan, small_plan, with_plan
from windlass.verify.proof_scope import ProofScope, overflows, proof_scope, proof_settings

if TYPE_CHECKING:
    from windlass.data import Batches, ExampleBatches, RowBatches, TokenDataset
    from windlass.runtime import InstrumentedRun

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
        self._runs: dict[str, InstrumentedRun] = {}

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

    def compare_to_plain_pytorch(self, asked: Planned) -> VerificationResult:
        """Compares two epochs of a plain run with plain PyTorch, which shares no code with it.

        The run takes few sequences a step, in float64: in float32 torch's own global norm is off by
        1e-5. Its data are a part of those of the other runs.

        Args:
            asked: the plan as it was asked for, whose schedules are compared too.

        Raises:
            WindlassError: a run failed.
        """
        from windlass.runtime import compare_to_plain_pytorch

        planned, folder = small_plan(self._plain), self._folder / "epochs"
        settings = planned.request.train
        batches = write_small_data(planned, folder, self._progress)
        run = self._run(folder.name, planned, Instrumentation())
        self._report("running plain PyTorch")
        set_memory_limit(None)
        return compare_to_plain_pytorch(
            run,
            planned.plan,
            build_requested_model(planned.request.model_identity, seed=settings.seed),
            batches,
            settings,
            schedule=asked.request.train,
            masks=asked.request.sparsity,
        )

    def scope(self, asked: Planned) -> ProofScope:
        """What the runs so far held, and what was not compared.

        Args:
            asked: the plan as it was asked for.
        """
        runs = {name: run.steps for name, run in self._runs.items()}
        return proof_scope(asked, self._planned, runs)

    def require_instructions(self) -> None:
        """Refuses faults where there are no instructions to inject them between.

        Raises:
            PlanError: the plan runs on another engine than the own runtime.
        """
        if self._planned.machine.stack is not None:
            raise PlanError(
                "`--faults` are injected between the instructions of Windlass's own runtime, which "
                f"the stack `{self._planned.plan.stack}` has none of; leave out `--faults`, or "
                "`--stack`"
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
        instrumentation = replace(instrumentation, overflow=overflows(planned))
        run = train(planned, folder=folder, instrumentation=instrumentation)
        own = planned.machine.stack is None
        self._runs[name] = InstrumentedRun(
            folder=run.folder, steps=tuple(run), has_fingerprints=own
        )
        return self._runs[name]

    def _report(self, label: str) -> None:
        if self._progress is not None:
            self._progress(label, 0, None)


def _require_memory(plain: Planned) -> None:
    """Refuses a model that does not fit this machine without a plan."""
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
    if plan.parallel.devices == 1 and plan.loss is None and plan.stack is None:
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
    least = {"epsilon": max(epsilon if has_epsilon else 0.0, settings.epsilon)}
    short = proof_settings(planned.request, plan, steps=steps)
    request = planned.request.model_copy(
        update={
            **short,
            "train": short["train"].model_copy(update=least),
            "precision": plan.precision,
            "moments": plan.moments,
            "master_weights": plan.master_weights is None,
        }
    )
    if plan.model is not None:
        plan = plan.model_copy(update={"model": request.model_identity})
    return with_plan(replace(planned, request=request), plan)


def _is_exact(plan: Plan) -> bool:
    """Whether a plan must equal the plain run bit for bit."""
    is_alone = plan.parallel.devices == 1 and plan.stack is None
    return is_alone and not plan.compile and plan.loss is None


_DOCUMENTS, _PACKED_DOCUMENTS = 3, 12
"""Documents of each source; windows take no notice of them, pairs of sentences do, and rows hold
several where they are packed."""

_MIN_EPOCH = 2
"""Fewest sequences of an epoch that have an order."""


def write_small_data(
    small: Planned, folder: Path, progress: Progress | None
) -> "Batches | ExampleBatches | RowBatches":
    """Writes the data of that run into its folder, a part of the others', and opens it.

    Args:
        small: a plan as `small_plan` makes it.

    Raises:
        WindlassError: the data cannot be read, or the disk is full.
    """
    from windlass.data import ExampleBatches, ExampleDataset, open_dataset

    settings = small.request.train
    held_out = 2 * settings.evaluate_sequences
    data = small.objects.examples or prepare_data(small.request, progress)
    if isinstance(data, ExampleDataset):
        few = data.excerpt(train=_epoch(), held_out=held_out)
        folder.mkdir(parents=True)
        few.save(folder / EXAMPLES_FILE)
        return ExampleBatches(few, batch=settings.batch, seed=settings.seed)
    excerpt = folder / TOKENS_FOLDER
    _write_excerpt(small, data, excerpt, held_out)
    return make_batches(small, open_dataset(excerpt) or data)


def _write_excerpt(small: Planned, tokens: "TokenDataset", folder: Path, held_out: int) -> None:
    """Writes some conversations, or beginnings of texts."""
    from windlass.data import RowBatches, beginnings, documents_of_rows, write_excerpt

    settings, data = small.request.train, small.request.data
    shares = data.weights or [part.tokens for part in tokens.meta.train.sources]
    epochs = [_epoch(share / sum(shares)) for share in shares]
    batches = make_batches(small, tokens)
    if isinstance(batches, RowBatches) and tokens.conversations is not None:
        train, held = documents_of_rows(batches, train=epochs, held_out=held_out)
    else:
        train, held = beginnings(
            tokens,
            # The rest fills no window, so that the rotation of an epoch shows.
            train=[epoch * settings.sequence + settings.sequence // 2 for epoch in epochs],
            # Twice the windows that are evaluated, so that they lie apart.
            held_out=held_out * settings.sequence + 1,
            documents=_PACKED_DOCUMENTS if data.packing else _DOCUMENTS,
            uneven=data.packing,
        )
    write_excerpt(tokens, folder, train=train, held_out=held)


def _epoch(share: float = 1.0) -> int:
    """Sequences of an epoch of a source with a share of the text."""
    return max(_MIN_EPOCH, round(SMALL_STEPS * SMALL_BATCH / 2 * share))
