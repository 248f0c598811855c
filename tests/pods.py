"""A world of processes that runs plan after plan, and the plans that it is given."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path

from hypothesis import strategies as st

from factories import tiny_machine, tiny_plan
from windlass.capture.capture_layers import capture_graph, capture_tensor_shards
from windlass.data.dataset_cache import prepare_dataset
from windlass.errors import InputErrors
from windlass.models.build import build_layer_stack
from windlass.models.catalog import is_causal
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_name, open_checkpoint
from windlass.runtime.checkpoint.merge_shards import merge_shards
from windlass.runtime.verify.compare_runs import InstrumentedRun, compare_to_single_device
from windlass.schema.graph import Graph, Precision
from windlass.schema.plan import Offload, Plan
from windlass.schema.request import TrainRequest
from windlass.schema.run_record import CHECKPOINT_FOLDER, Step
from windlass.schema.verification import VerificationResult

BATCH, SEQUENCE, LAYERS = 8, 16, 6
MACHINE = tiny_machine(host="1 GiB", devices=16)
SETTINGS = TrainRequest(
    steps=3, batch=BATCH, learning_rate=1e-2, warmup=0.4, clip=0.5, epsilon=1e-4, seed=7,
    evaluate_every=3, evaluate_sequences=6, save_every=1, keep=3,
)  # fmt: skip
"""Clipping on, and an epsilon at which noise moves no weight; see `settings` of the runtime."""

FAR = (
    Offload(parameters="disk", gradients="disk", optimizer="disk"),
    Offload(parameters="host", gradients="host", optimizer="host", activations="host"),
)


class World:
    """Processes that run one plan after the other, and compare each with one device.

    Args:
        folder: for all runs.
        size: processes; a plan takes the first of them.
        degrees: of slices that plans may have.
        width: of the model.
        model: by name, of either family.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        degrees: tuple[int, ...],
        *,
        width: int = 32,
        model: str = "gpt-tiny",
    ) -> None:
        self._folder = folder
        self._jobs = count()
        self._references: dict[str, InstrumentedRun] = {}
        source = folder / "text"
        source.mkdir()
        for index in range(12):
            words = [f"word{(index * 7 + at * at) % 23}" for at in range(120)]
            (source / f"document{index}.txt").write_text(" ".join(words))
        data = {"source": str(source), "tokenizer": "byte", "vocabulary": 300, "held_out": 0.2}
        tokens = prepare_dataset(**data, cache=folder / "cache")
        dials = {
            "layers": LAYERS - 2, "width": width, "heads": 8, "sequence": 48, "dropout": 0.1,
            "vocabulary": tokens.vocabulary + (not is_causal(model)),
        }  # fmt: skip
        self.chain: LayerStack = build_layer_stack(model, dials, device="meta")
        self.graph: Graph = capture_tensor_shards(self.chain, capture_graph(self.chain), degrees)
        (folder / "graph.json").write_bytes(self.graph.to_json().encode())
        told = {"name": model, "dials": dials, "data": data}
        (folder / "model.json").write_text(json.dumps(told))
        self._size = size
        self._ranks = self._started()

    def _started(self) -> list[subprocess.Popen[str]]:
        script = str(Path(__file__).parent / "runtime" / "pod_rank.py")
        return [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(self._size)
        ]

    def close(self) -> None:
        for process in self._ranks:
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()

    def run(
        self,
        plan: Plan,
        fault: str | None = None,
        settings: TrainRequest = SETTINGS,
        begun: Path | None = None,
    ) -> InstrumentedRun:
        """Runs a plan on as many processes as it takes, anew or from a whole checkpoint."""
        folder = self._folder / f"job{next(self._jobs)}"
        folder.mkdir()
        job = {"plan": plan.model_dump(mode="json"), "fault": fault}
        job["train"] = settings.model_dump(mode="json")
        job["begun"] = None if begun is None else str(begun)
        (folder / "job.json").write_text(json.dumps(job))
        ranks = self._ranks[: plan.parallel.devices]
        for process in ranks:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        told = {process.stdout.readline() for process in ranks}
        if told != {"done\n"}:
            self.close()
            self._ranks = self._started()
            wrong = [path.read_text() for path in sorted(folder.glob("error*"))]
            raise AssertionError(f"{plan.to_toml()}\n" + "\n".join(wrong))
        steps = tuple(Step(**step) for step in json.loads((folder / "steps.json").read_text()))
        return InstrumentedRun(folder=folder, steps=steps)

    def proof(self, plan: Plan, fault: str | None = None) -> tuple[VerificationResult, InstrumentedRun]:
        """A plan against one device, whose run serves for all plans of one precision."""
        ran, reference = self.run(plan, fault), self.alone(plan.precision)
        return compare_to_single_device(ran, reference, self.chain, SETTINGS, precision=plan.precision), ran

    def alone(self, precision: Precision) -> InstrumentedRun:
        """The run of one device."""
        if precision not in self._references:
            plan = tiny_plan(
                self.graph, MACHINE, micro=1, accumulation=BATCH, sequence=SEQUENCE,
                precision=precision,
            )  # fmt: skip
            self._references[precision] = self.run(plan)
        return self._references[precision]

    def left_by(self, ran: InstrumentedRun, step: int) -> Path:
        """The checkpoint that a run left after a step, with whole layers."""
        left = open_checkpoint(ran.folder / CHECKPOINT_FOLDER / checkpoint_name(step))
        return merge_shards(left, self.chain, ran.folder / f"whole{step}").path

    def held_out(self, precision: Precision) -> float | None:
        """What one device lost on held-out text at the end."""
        return self.alone(precision).steps[-1].held_out_loss


def sent_by(ran: InstrumentedRun, device: int) -> Mapping[str, Mapping[str, float]]:
    """What a device sent in a step, by who counted and by kind."""
    found: Mapping[str, Mapping[str, float]] = json.loads(
        (ran.folder / f"sent{device}.json").read_text()
    )
    return found


def legal(plan: Plan, graph: Graph) -> bool:
    """Whether it can be run: shards of weights away from the near tier are those of the state."""
    if plan.is_offloaded("parameters") and plan.sharding.parameters != plan.sharding.optimizer:
        return False
    try:
        lower(plan, graph)
    except InputErrors:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, graph: Graph, devices: tuple[int, ...] = (2, 4)) -> Plan:
    """Any legal plan for so many devices, of a step of `BATCH` samples."""
    cut = draw(st.sampled_from([c for d in devices for c in cuts(d, tuple(graph.tensor_shards))]))
    pipeline, tensor, replicas = cut
    micro = draw(st.sampled_from([m for m in (1, 2, 4) if BATCH // replicas % m == 0]))
    optimizer = draw(st.sampled_from(divisors(replicas)))
    far = draw(st.sampled_from([None, None, *FAR]))
    orders = ["gpipe", "1f1b"] if far else ["gpipe", "1f1b", "zero-bubble", "interleaved"]
    order = draw(st.sampled_from(orders if pipeline > 1 else orders[:3]))
    accumulation = BATCH // replicas // micro
    chunks = LAYERS // pipeline if order == "interleaved" else 1
    if accumulation % pipeline or chunks < 2:
        order, chunks = ("1f1b", 1) if order == "interleaved" else (order, 1)
    chunks = draw(st.integers(2, chunks)) if chunks > 1 else 1
    weights = optimizer if far else draw(st.sampled_from(divisors(optimizer)))
    recomputes = ("none", "layer") if order == "zero-bubble" else ("none", "selective", "layer")
    plan = tiny_plan(
        graph, MACHINE, pipeline=pipeline, tensor=tensor, data=replicas, micro=micro,
        accumulation=accumulation, sequence=SEQUENCE, sharding=(weights, optimizer), schedule=order,
        virtual_stages=chunks, offload=far, recompute=draw(st.sampled_from(recomputes)),
        recompute_layers=draw(st.sampled_from([None, 1, 2])),
        precision="float32" if far else draw(st.sampled_from(["float64", "float64", "float32"])),
        stages=phased(draw, pipeline) if far else parted(draw, pipeline * chunks),
    )  # fmt: skip
    assert legal(plan, graph), plan
    return plan


def parted(draw: st.DrawFn, parts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layers in so many parts of one phase each."""
    most = LAYERS - 1
    ends = draw(st.sets(st.integers(1, most), min_size=parts - 1, max_size=parts - 1))
    return tuple((pair,) for pair in pairwise([0, *sorted(ends), LAYERS]))


def phased(draw: st.DrawFn, stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The layers in more phases than stages, so many to each that all have at least one."""
    most = LAYERS - 1
    ends = sorted(draw(st.sets(st.integers(1, most), min_size=stages, max_size=most)))
    phases = tuple(pairwise([0, *ends, LAYERS]))
    cuts_ = draw(st.sets(st.integers(1, len(phases) - 1), min_size=stages - 1, max_size=stages - 1))
    return tuple(phases[a:b] for a, b in pairwise([0, *sorted(cuts_), len(phases)]))


def cuts(devices: int, slices: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Every pipeline x tensor x replicas of so many devices that the model takes."""
    for pipeline in divisors(devices):
        for tensor in (1, *slices):
            if pipeline <= LAYERS and devices // pipeline % tensor == 0:
                yield pipeline, tensor, devices // pipeline // tensor


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
