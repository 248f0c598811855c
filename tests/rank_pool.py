"""A pool of rank processes that run one plan after another, and strategies for such plans."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from factories import catalog_graph, tiny_machine, tiny_plan, write_documents
from forked_runs import beside_tests
from program_bytes import sent_bytes_by_kind
from windlass.capture.capture_layers import capture_graph, capture_tensor_shards
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.examples import ExampleDataset
from windlass.errors import InputErrors
from windlass.models.build import build_layer_stack
from windlass.models.catalog import has_config, is_causal
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_name, open_checkpoint
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.schema import LoraRequest
from windlass.schema.answers.verification import TOLERANCE, VerificationResult
from windlass.schema.data_request import DataRequest
from windlass.schema.graph import Graph, Precision
from windlass.schema.plan import Offload, Plan
from windlass.schema.run_record import CHECKPOINT_FOLDER, Step
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.train_request import TrainSettings

BATCH, SEQUENCE, LAYERS = 8, 16, 6
MACHINE = tiny_machine(host="1 GiB", devices=16)
SETTINGS = TrainSettings(
    steps=3, batch=BATCH, sequence=SEQUENCE, learning_rate=1e-2, warmup=0.4, clip=0.5,
    epsilon=1e-4, seed=7, evaluate_every=3, evaluate_sequences=6, save_every=1, keep=3,
)  # fmt: skip
"""Clipping on, and an epsilon at which noise moves no weight; see `settings` of the runtime."""

EXAMPLES = "examples.safetensors"
"""File of a pool's folder with the examples that it trains on, if it trains on any."""

OFFLOADED = (
    Offload(parameters="disk", gradients="disk", optimizer="disk"),
    Offload(parameters="host", gradients="host", optimizer="host", activations="host"),
)


SCORE_TOLERANCE = 1e-5
"""Relative tolerance of scores of tasks in float32; a perplexity is the exponential of a sum of
losses of some hundred tokens."""
LOSS_TOLERANCE = 1e-6
"""Relative tolerance of held-out losses in float32: 6e-8 for each of a dozen sums."""

slow = partial(pytest.param, marks=pytest.mark.slow)


class RankProcesses:
    """Processes that run jobs, forked from one that imports torch; see `pool_rank.py`.

    Args:
        size: how many.
        source: folder of the package that they import; None means the one that tests import.
    """

    def __init__(self, size: int, source: Path | None = None) -> None:
        self._size = size
        self._path = {} if source is None else {"PYTHONPATH": str(source)}
        self._start()

    def _start(self) -> None:
        script = Path(__file__).parent / "runtime" / "distributed" / "pool_rank.py"
        jobs, answers = ([os.pipe() for _ in range(self._size)] for _ in range(2))
        pairs = [(job[0], answer[1]) for job, answer in zip(jobs, answers, strict=True)]
        words = [f"{job},{answer}" for job, answer in pairs]
        passed = tuple(chain(*pairs))
        self._parent = subprocess.Popen(
            [sys.executable, str(script), *words], pass_fds=passed, start_new_session=True,
            env=beside_tests({**os.environ, **self._path}),
        )  # fmt: skip
        for descriptor in passed:
            os.close(descriptor)
        self._jobs = [os.fdopen(job[1], "w") for job in jobs]
        self._answers = [os.fdopen(answer[0]) for answer in answers]

    def run(self, folder: Path, ranks: int) -> bool:
        """Runs the job of a folder on the first ranks; returns whether it is done."""
        for jobs in self._jobs[:ranks]:
            jobs.write(f"{folder}\n")
            jobs.flush()
        return {answers.readline() for answers in self._answers[:ranks]} == {"done\n"}

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.wait()
        for pipe in (*self._jobs, *self._answers):
            pipe.close()


class RankPool:
    """Rank processes that run one plan after another, to compare each with a single device.

    Args:
        folder: folder of all runs.
        size: number of processes; a plan takes the first of them.
        degrees: tensor-parallel degrees that plans may have.
        width: width of the model.
        model: name of a catalog model, or `file.py:function`.
        processes: the processes, if another pool has started them.
        examples: what is trained on in place of text.
        lora: adapters beside the model, which freeze it; None trains all weights.
        sparsity: which weights are kept; None keeps all.
        dials: changes to the model; None makes a small one of text.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        degrees: tuple[int, ...],
        *,
        width: int = 32,
        model: str = "gpt-tiny",
        processes: "RankProcesses | None" = None,
        examples: ExampleDataset | None = None,
        lora: LoraRequest | None = None,
        sparsity: SparsityRequest | None = None,
        dials: dict[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self.processes = processes or RankProcesses(size)
        self._jobs = count()
        self._references: dict[tuple[str, str], InstrumentedRun] = {}
        self._verified: dict[str, tuple[VerificationResult, InstrumentedRun]] = {}
        source = folder / "text"
        source.mkdir()
        write_documents(source)
        data = {"source": str(source), "tokenizer": "byte", "vocabulary": 300, "held_out": 0.2}
        tokens = prepare_dataset(DataRequest(**data), cache=folder / "cache")
        self.dials = dials = dials or {
            "layers": LAYERS - 2, "width": width, "heads": 8, "sequence": 48, "dropout": 0.1,
            "vocabulary": tokens.vocabulary + (not is_causal(model)),
        }  # fmt: skip
        self.stack: LayerStack = build_layer_stack(
            model, dials, device="meta", lora=lora, sparsity=sparsity
        )
        shape = self.stack.examples
        self.sequence = SEQUENCE if shape is None else shape.positions
        self.graph: Graph = (
            catalog_graph(model, *degrees, sparsity=sparsity, **dials)
            if has_config(model) and lora is None and shape is None
            else capture_tensor_shards(self.stack, capture_graph(self.stack), degrees)
        )
        (folder / "graph.json").write_bytes(self.graph.to_json().encode())
        description = {"name": model, "dials": dials, "data": data}
        description["lora"] = None if lora is None else lora.model_dump(mode="json")
        self._model = ModelIdentity(name=model, sparsity=sparsity)
        (folder / "model.json").write_text(json.dumps(description))
        if examples is not None:
            examples.save(folder / EXAMPLES)

    def close(self) -> None:
        self.processes.close()

    def run(
        self,
        plan: Plan,
        fault: str | None = None,
        settings: TrainSettings = SETTINGS,
        resume: Path | None = None,
    ) -> InstrumentedRun:
        """Runs a plan on as many processes as it needs, from the start or from a checkpoint."""
        folder = self._folder / f"job{next(self._jobs)}"
        folder.mkdir()
        plan = plan.model_copy(update={"model": self._model, "ema": settings.ema})
        job = {"plan": plan.model_dump(mode="json"), "fault": fault}
        job["train"] = settings.model_dump(mode="json")
        job["resume"] = None if resume is None else str(resume)
        (folder / "job.json").write_text(json.dumps(job))
        if not self.processes.run(folder, plan.parallel.devices):
            self.processes.restart()
            errors = [path.read_text() for path in sorted(folder.glob("error*"))]
            raise AssertionError(f"{plan.to_toml()}\n" + "\n".join(errors))
        steps = tuple(Step(**step) for step in json.loads((folder / "steps.json").read_text()))
        return InstrumentedRun(folder=folder, steps=steps, has_fingerprints=plan.stack is None)

    def verify(
        self, plan: Plan, fault: str | None = None, settings: TrainSettings = SETTINGS
    ) -> tuple[VerificationResult, InstrumentedRun]:
        """Compares a plan with a single device, whose run is shared by plans of one precision.

        What is asked twice is run once.
        """
        key = f"{plan.to_json()} {fault} {settings.to_json()}"
        if key not in self._verified:
            run = self.run(plan, fault, settings)
            self._verified[key] = self.compared(run, plan, settings), run
        return self._verified[key]

    def compared(
        self, run: InstrumentedRun, plan: Plan, settings: TrainSettings = SETTINGS
    ) -> VerificationResult:
        """A run of a plan beside a single device."""
        reference = self.single_device_run(plan.precision, settings)
        return compare_to_single_device(
            run, reference, self.stack, settings, precision=plan.precision
        )

    def single_device_run(
        self, precision: Precision, settings: TrainSettings = SETTINGS
    ) -> InstrumentedRun:
        """The run on a single device."""
        key = (precision, settings.to_json())
        if key not in self._references:
            plan = tiny_plan(
                self.graph, MACHINE, micro=1, accumulation=BATCH, sequence=self.sequence,
                precision=precision,
            )  # fmt: skip
            self._references[key] = self.run(plan, settings=settings)
        return self._references[key]

    def merged_checkpoint(self, run: InstrumentedRun, step: int) -> Path:
        """The checkpoint that a run left after a step, with full layers."""
        checkpoint = open_checkpoint(run.folder / CHECKPOINT_FOLDER / checkpoint_name(step))
        return merge_shards(checkpoint, self.stack, run.folder / f"merged{step}").path

    def last_step(self, precision: Precision) -> Step:
        """The last step of the run on a single device."""
        return self.single_device_run(precision).steps[-1]


class CheckedPlans:
    """Checks plans, and keeps the largest errors for a summary."""

    def __init__(self) -> None:
        self.plans: set[str] = set()
        self.worst = dict.fromkeys(TOLERANCE, 0.0)

    def check(self, pool: RankPool, plan: Plan) -> None:
        """Runs a plan, compares it with a single device and counts its bytes."""
        result, run = pool.verify(plan)
        assert result.passed, f"{result.first_mismatch}\n{plan.to_toml()}"
        last, expected = run.steps[-1], pool.last_step(plan.precision)
        assert last.held_out_loss == pytest.approx(expected.held_out_loss, rel=LOSS_TOLERANCE)
        assert last.task_scores == pytest.approx(dict(expected.task_scores), rel=SCORE_TOLERANCE)
        require_bytes(pool, plan, run)
        self.plans.add(plan.label)
        worst = max(each.error for each in result.comparisons)
        self.worst[plan.precision] = max(worst, self.worst[plan.precision])

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items() if error)
        return f"{len(self.plans)} plans equal to a single device; largest errors: {errors}"


def require_bytes(pool: RankPool, plan: Plan, run: InstrumentedRun) -> None:
    """Requires that the buffers given to torch and the program agree."""
    for rank in range(plan.parallel.devices):
        counted, expected = sent_bytes(run, rank), sent_bytes_by_kind(plan, pool.graph, rank)
        assert {kind: n for kind, n in counted.items() if n} == expected, plan.to_toml()


def sent_bytes(run: InstrumentedRun, rank: int) -> Mapping[str, float]:
    """Bytes that a rank sent per step, by instruction kind."""
    counted: Mapping[str, float] = json.loads((run.folder / f"sent{rank}.json").read_text())
    return counted


def legal(plan: Plan, graph: Graph) -> bool:
    """Whether a plan can run; offloaded parameters are sharded as the optimizer state is."""
    if plan.is_offloaded("parameters") and plan.sharding.parameters != plan.sharding.optimizer:
        return False
    try:
        lower(plan, graph)
    except InputErrors:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, graph: Graph, devices: tuple[int, ...] = (2, 4)) -> Plan:
    """Any legal plan for one of some device counts, with `BATCH` samples per step."""
    degrees = [d for n in devices for d in parallel_degrees(n, tuple(graph.tensor_shards))]
    pipeline, tensor, data = draw(st.sampled_from(degrees))
    micro = draw(st.sampled_from([m for m in (1, 2, 4) if BATCH // data % m == 0]))
    # Ranks that divide sequences are replicas with fewer samples each.
    replicas, context = data, draw(st.sampled_from([c for c in (1, 1, 2, 4) if data % c == 0]))
    data = replicas // context
    optimizer = draw(st.sampled_from(divisors(replicas)))
    offload = draw(st.sampled_from([None, None, *OFFLOADED]))
    schedules = ["gpipe", "1f1b"] if offload else ["gpipe", "1f1b", "zero-bubble"]
    schedules += ["interleaved"] if pipeline > 1 else []
    schedule = draw(st.sampled_from(schedules))
    accumulation = BATCH // data // micro
    chunks = LAYERS // pipeline if schedule == "interleaved" else 1
    if (accumulation % pipeline and not offload) or chunks < 2:
        schedule, chunks = ("1f1b", 1) if schedule == "interleaved" else (schedule, 1)
    chunks = draw(st.integers(2, chunks)) if chunks > 1 else 1
    parameters = optimizer if offload else draw(st.sampled_from(divisors(optimizer)))
    recomputes = ("none", "full") if schedule == "zero-bubble" else ("none", "selective", "full")
    precisions = ["float32"] if offload else ["float64", "float64", "float32"]
    plan = tiny_plan(
        graph, MACHINE, pipeline=pipeline, tensor=tensor, data=data, context=context, micro=micro,
        accumulation=accumulation, sequence=SEQUENCE, sharding=(parameters, optimizer),
        schedule=schedule, virtual_stages=chunks, offload=offload,
        recompute=draw(st.sampled_from(recomputes)),
        recompute_layers=draw(st.sampled_from([None, 1, 2])),
        precision=draw(st.sampled_from(precisions)),
        stages=stages_in_phases(draw, pipeline)
        if offload and chunks == 1
        else stages(draw, pipeline * chunks),
    )  # fmt: skip
    assert legal(plan, graph), plan
    return plan


def stages(draw: st.DrawFn, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layers divided into `count` stages of one phase each."""
    most = LAYERS - 1
    ends = draw(st.sets(st.integers(1, most), min_size=count - 1, max_size=count - 1))
    return tuple((pair,) for pair in pairwise([0, *sorted(ends), LAYERS]))


def stages_in_phases(draw: st.DrawFn, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layers divided into more phases than stages, at least one for each of `count` stages."""
    most = LAYERS - 1
    ends = sorted(draw(st.sets(st.integers(1, most), min_size=count, max_size=most)))
    phases = tuple(pairwise([0, *ends, LAYERS]))
    splits = draw(st.sets(st.integers(1, len(phases) - 1), min_size=count - 1, max_size=count - 1))
    return tuple(phases[a:b] for a, b in pairwise([0, *sorted(splits), len(phases)]))


def parallel_degrees(
    devices: int, tensor_degrees: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Every (pipeline, tensor, data) for a number of devices that the model permits."""
    for pipeline in divisors(devices):
        for tensor in (1, *tensor_degrees):
            if pipeline <= LAYERS and devices // pipeline % tensor == 0:
                yield pipeline, tensor, devices // pipeline // tensor


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
