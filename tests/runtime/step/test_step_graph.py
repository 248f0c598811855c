"""Steps that are recorded and replayed equal those that are not, bit for bit.

They run on the simulated accelerator: nothing runs while it is recorded, a replay reads and writes
the memory of the recording, and what is freed in it is overwritten by its next owner.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from simulated_device import AT_ONCE, SCHEDULES, Schedule, SimulatedDevice
from windlass.data.batches import Batches
from windlass.errors import PlanError, RunBroken, WindlassError
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_folders, latest_checkpoint
from windlass.runtime.optimizers.step_numbers import StepNumbers
from windlass.runtime.rank_context import RankContext
from windlass.runtime.step import step_state
from windlass.runtime.step.step_inputs import StepInputs
from windlass.runtime.step.step_state import StepState
from windlass.runtime.step_outcome import StepOutcome
from windlass.runtime.train import TimelineRecorder, train_loop
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Plan, Stage
from windlass.schema.train_request import ParameterGroup, TrainSettings
from windlass.torch_ext import Device, device_for

SHAPE = {"layers": 1, "width": 8, "heads": 2, "sequence": 4, "dropout": 0.1}
STEPS = 5
"""Two that run unrecorded, one that is recorded, and two replays."""
BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}


class Case(NamedTuple):
    """How steps compute."""

    precision: str = "float32"
    clip: float | None = 0.5
    optimizer: str = "adamw"
    recompute: str = "none"
    steps: int = STEPS


CASES = {
    "float32": Case(),
    "bfloat16 with recompute": Case(precision="bfloat16", recompute="full"),
    "without clipping": Case(clip=None),
    "momentum": Case(optimizer="sgd", recompute="selective"),
}


class Result(NamedTuple):
    """What a run leaves."""

    losses: list[float]
    norms: list[str]
    """As words, because NaN differs from itself."""
    tensors: dict[str, torch.Tensor]
    replays: int

    def equals(self, other: "Result") -> bool:
        """Whether all but the number of replays is the same bit for bit."""
        return (
            (self.losses, self.norms) == (other.losses, other.norms)
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)
        )


class Runs:
    """Trains a tiny GPT with a learning rate of its own for its norms."""

    def __init__(
        self, stack: Callable[[], LayerStack], graph: Graph, batches: Batches, folder: Path
    ) -> None:
        self._stack, self._graph, self._batches, self._folder = stack, graph, batches, folder
        self._plain: dict[Case, Result] = {}

    def plan(self, case: Case, *, recorded: bool) -> Plan:
        return Plan(
            graph=self._graph.label, machine="here@000000000000", precision=case.precision,
            clip=case.clip is not None, step_graph=True if recorded else None,
            optimizer=None if case.optimizer == "adamw" else case.optimizer,
            batch=Batch(sequence=4, micro=2, accumulation=2),
            stages=(Stage(phases=((0, 3),), recompute=case.recompute),),
        )  # fmt: skip

    def train(
        self,
        case: Case,
        device: Device,
        folder: Path,
        *,
        recorded: bool,
        until: int | None = None,
        timelines: frozenset[int] = frozenset(),
    ) -> tuple[list[float], list[str]]:
        """Losses and norms of the steps up to one, from where the folder's checkpoints end."""
        plan = self.plan(case, recorded=recorded)
        settings = TrainSettings(
            steps=case.steps, batch=4, sequence=4, learning_rate=1e-2, warmup=0.4, epsilon=1e-4,
            seed=7, clip=case.clip, save_every=4, keep=2, evaluate_every=4, evaluate_sequences=2,
            optimizer=case.optimizer, groups=(ParameterGroup(pattern="*norm*", rate_factor=0.3),),
        )  # fmt: skip
        context = RankContext(
            plan=plan, stack=self._stack(), program=lower(plan, self._graph)[0],
            settings=settings, checkpoints=folder, device=device,
        )  # fmt: skip
        recorder = TimelineRecorder(steps=timelines, record=lambda *_: None)
        resume = latest_checkpoint(folder)
        steps = []
        for step in train_loop(context, self._batches, resume=resume, recorder=recorder):
            steps.append(step)
            if step.step == until:
                break
        return [step.loss for step in steps], [repr(step.gradient_norm) for step in steps]

    def __call__(
        self, case: Case, schedule: Schedule, *, recorded: bool, stops: int | None = None
    ) -> Result:
        """What a run leaves, which may stop after a step and go on."""
        folder = Path(mkdtemp(dir=self._folder)) / "checkpoints"
        losses: list[float] = []
        norms: list[str] = []
        replays = 0
        for until in (stops, None) if stops else (None,):
            with SimulatedDevice(schedule) as device:
                more = self.train(case, device, folder, recorded=recorded, until=until)
            assert device.simulation.faults == []
            losses, norms = losses + more[0], norms + more[1]
            replays += device.simulation.replays
        tensors = {
            f"{checkpoint.name}/{name}": tensor
            for checkpoint in checkpoint_folders(folder)
            for file in sorted(checkpoint.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
            if not name.startswith("zeros/")
        }
        shutil.rmtree(folder.parent)
        return Result(losses, norms, tensors, replays)

    def plain(self, case: Case) -> Result:
        """The run that records nothing, with all work done at once."""
        if case not in self._plain:
            self._plain[case] = self(case, AT_ONCE, recorded=False)
        return self._plain[case]


@pytest.fixture(scope="module")
def run(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    stack = partial(gpt, device="meta", **SHAPE)
    folder = tmp_path_factory.mktemp("recorded")
    return Runs(stack, graph_of(**SHAPE), batches(batch=4, sequence=4), folder)


def test_recorded_steps_equal_those_that_are_not(run: Runs):
    recorded = run(CASES["float32"], BY_NAME["late"], recorded=True)
    assert recorded.equals(run.plain(CASES["float32"]))
    assert recorded.replays == 2 * (STEPS - 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("name", CASES)
def test_no_schedule_changes_a_bit_of_recorded_steps(run: Runs, name: str, schedule: Schedule):
    assert run(CASES[name], schedule, recorded=True).equals(run.plain(CASES[name]))


@pytest.mark.slow
def test_a_recorded_run_that_stops_and_resumes_equals_one_that_went_on(run: Runs):
    resumed = run(CASES["float32"], BY_NAME["sides late"], recorded=True, stops=4)
    assert resumed.equals(run.plain(CASES["float32"]))


OVERFLOWS = Case(precision="float16", steps=12)


@pytest.mark.slow
def test_an_overflowed_step_is_skipped_before_and_after_recording(run: Runs):
    with patch.object(step_state, "_CLEAN_STEPS", 1):
        recorded = run(OVERFLOWS, BY_NAME["late"], recorded=True)
        plain = run.plain(OVERFLOWS)
    assert "nan" in plain.norms[4:]
    assert recorded.equals(plain)
    assert recorded.replays > 8


@pytest.mark.slow
def test_updates_that_are_replayed_although_a_gradient_overflowed_are_noticed(run: Runs):
    decide = StepOutcome.decide

    def always(self: StepOutcome, state: StepState) -> bool:
        decide(self, state)
        return True

    with (
        patch.object(step_state, "_CLEAN_STEPS", 1),
        patch.object(StepOutcome, "decide", always),
        pytest.raises(RunBroken, match="the loss is nan"),
    ):
        run(OVERFLOWS, BY_NAME["late"], recorded=True)


@pytest.mark.slow
def test_a_step_whose_timeline_is_asked_for_runs_unrecorded(run: Runs, tmp_path: Path):
    case = CASES["float32"]
    with SimulatedDevice(AT_ONCE) as device:
        timelines = frozenset({4})
        losses, _ = run.train(case, device, tmp_path, recorded=True, timelines=timelines)
    assert losses == run.plain(case).losses
    assert device.simulation.replays == 2 * (STEPS - 3)


def test_a_cpu_records_no_steps(run: Runs, tmp_path: Path):
    with pytest.raises(PlanError, match="`step_graph` = true, but torch records no work of `cpu`"):
        run.train(CASES["float32"], device_for("cpu"), tmp_path, recorded=True)


def _nothing(*_: object) -> None:
    """Does nothing."""


class Mutant(NamedTuple):
    """What is done wrong."""

    of: type
    method: str
    instead: Callable[..., object]


def _to_new_memory(self: StepInputs, _: object, values: object) -> torch.Tensor:
    return self._device.to_device(torch.as_tensor(values))


def _first_divisor(self: StepNumbers, *_: object, **__: object) -> torch.Tensor | None:
    return self._divisor


def _without_keys(self: StepInputs, **_: object) -> None:
    for micro in range(2):
        self._tokens[micro] = self._read(micro)


MUTANTS = {
    "a learning rate that is not filled": Mutant(StepNumbers, "begin_step", _nothing),
    "a divisor that is not filled": Mutant(StepNumbers, "clip_divisor", _first_divisor),
    "inputs in other memory": Mutant(StepInputs, "_put", _to_new_memory),
    "dropout keys that are not brought": Mutant(StepInputs, "load_all", _without_keys),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_replay_misses_is_noticed(run: Runs, name: str):
    of, method, instead = MUTANTS[name]
    with patch.object(of, method, instead):
        try:
            recorded = run(CASES["float32"], BY_NAME["late"], recorded=True)
        except (WindlassError, AttributeError):
            return
    assert not recorded.equals(run.plain(CASES["float32"]))
