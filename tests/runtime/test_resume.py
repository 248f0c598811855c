"""Runs that are stopped, killed and resumed, compared with uninterrupted ones."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forked_runs import forking_process
from windlass.capture.capture_layers import capture_graph
from windlass.data.batches import Batches
from windlass.data.token_files import TokenDataset
from windlass.errors import CheckpointError, RunInterrupted
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import Checkpoint, checkpoint_folders, latest_checkpoint
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import never_stop, train_loop
from windlass.schema.graph import Graph
from windlass.schema.model_request import LoraRequest
from windlass.schema.plan import Offload, Plan, Stage
from windlass.schema.run_record import Step
from windlass.schema.sparsity import ModelIdentity, SparsityRequest
from windlass.schema.train_request import TrainRequest

KINDS = [
    {"precision": "float32", "micro": 4},
    {"precision": "float32", "micro": 2, "recompute": "full"},
    {"precision": "bfloat16", "micro": 4, "recompute": "full"},
    {"precision": "bfloat16", "micro": 1},
]


@pytest.fixture
def run(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
    folder: Path,
):
    """Runs the same training under several conditions."""

    def make(
        kind: dict[str, Any],
        where: str = "full",
        *,
        resume: Checkpoint | None = None,
        stop: Callable[[], bool] = never_stop,
        steps: int = 6,
        **fields: float,
    ) -> Iterator[Step]:
        stack = gpt(dropout=0.1, device="meta")
        options = {name: value for name, value in kind.items() if name != "micro"}
        run_plan = plan(stack, micro=kind["micro"], accumulation=4 // kind["micro"], **options)
        request = settings(steps=steps, save_every=2, keep=3, **fields)
        context = RankContext(
            plan=run_plan,
            stack=stack,
            program=program(run_plan),
            settings=request,
            checkpoints=folder / where,
        )
        return train_loop(context, batches(), resume=resume, stop=stop)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    kind: dict[str, Any], run: Callable[..., Iterator[Step]], folder: Path
):
    full = {step.step: step for step in run(kind)}
    interrupted = run(kind, "stopped")
    for step in interrupted:
        if step.step == 5:  # one after a save, one before the next
            interrupted.close()
    checkpoint = latest_checkpoint(folder / "stopped")
    assert checkpoint.manifest.step == 4
    resumed = {step.step: step for step in run(kind, "stopped", resume=checkpoint)}
    assert list(resumed) == [5, 6]
    for number, step in resumed.items():
        assert (step.loss, step.gradient_norm) == (full[number].loss, full[number].gradient_norm)
        assert step.held_out_loss == full[number].held_out_loss
    ends = [latest_checkpoint(folder / where).manifest.files for where in ("full", "stopped")]
    assert ends[0] == ends[1]


def test_a_request_to_stop_saves_the_last_complete_step(
    run: Callable[..., Iterator[Step]], folder: Path
):
    losses = [step.loss for step in run(KINDS[1])]
    answers = iter([False] * 7 + [True])  # two micro-batches a step: in the middle of step 4
    seen = []
    with pytest.raises(RunInterrupted, match=r"after step 3.*step-00000003") as stopped:
        seen.extend(step.loss for step in run(KINDS[1], "stopped", stop=lambda: next(answers)))
    assert stopped.value.exit_code == 130
    assert seen == losses[:3]
    checkpoint = latest_checkpoint(folder / "stopped")
    assert checkpoint.manifest.step == 3
    assert [step.loss for step in run(KINDS[1], "stopped", resume=checkpoint)] == losses[3:]


@pytest.mark.parametrize("mode", [{}, {"compile": True}])
def test_a_request_to_stop_before_the_first_step_leaves_nothing(
    mode: dict[str, bool], run: Callable[..., Iterator[Step]], folder: Path
):
    with pytest.raises(RunInterrupted, match="no checkpoint"):
        list(run(KINDS[0] | mode, "stopped", stop=lambda: True))
    assert checkpoint_folders(folder / "stopped") == ()


def test_a_damaged_checkpoint_is_skipped_and_written_again(
    run: Callable[..., Iterator[Step]], folder: Path
):
    list(run(KINDS[0]))
    full = latest_checkpoint(folder / "full").manifest
    damaged = sorted((folder / "full" / "step-00000006").glob("*.safetensors"))[1]
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    checkpoint = latest_checkpoint(folder / "full")
    assert checkpoint.manifest.step == 4
    assert damaged.name in checkpoint.damaged[0]
    list(run(KINDS[0], resume=checkpoint))
    rewritten = latest_checkpoint(folder / "full")
    assert rewritten.damaged == ()
    assert rewritten.manifest == full


def test_a_checkpoint_of_another_model_is_refused(
    run: Callable[..., Iterator[Step]],
    folder: Path,
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
):
    list(run(KINDS[0]))
    stack = gpt(width=48)
    run_plan = plan(stack)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings(),
        checkpoints=folder / "other",
    )  # fmt: skip
    steps = train_loop(context, batches(), resume=latest_checkpoint(folder / "full"))
    with pytest.raises(CheckpointError, match=r"\(257, 32\).*\(257, 48\).*another model"):
        next(steps)


def test_a_checkpoint_of_another_batch_is_refused(
    run: Callable[..., Iterator[Step]],
    folder: Path,
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
):
    list(run(KINDS[0]))
    stack = gpt()
    run_plan = plan(stack, micro=2)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings(batch=2),
        checkpoints=folder / "other",
    )  # fmt: skip
    steps = train_loop(context, batches(batch=2), resume=latest_checkpoint(folder / "full"))
    with pytest.raises(CheckpointError, match="not 2 a step"):
        next(steps)


@pytest.fixture(scope="module")
def runs() -> Iterator[subprocess.Popen[str]]:
    """A process that forks a run for each line that it is given; see `killed_run.py`."""
    with forking_process(Path(__file__).with_name("killed_run.py")) as process:
        yield process


def kill_and_resume(
    runs: subprocess.Popen[str], request: dict, kills: int, seed: int, *, is_long: bool = False
) -> dict[int, str]:
    """Losses by step of a run that was killed at random moments, and then ran to its end.

    A long run has steps left at every kill.
    """
    draws = random.Random(seed)
    losses: dict[int, str] = {}
    for attempt in range(kills + 1):
        runs.stdin.write(f"{json.dumps(request)}\n")
        runs.stdin.flush()
        steps_left = draws.randrange(1, 9) if attempt < kills else 10**9
        key, process_id = runs.stdout.readline().split()
        assert key == "process"
        for line in runs.stdout:  # lines printed before it was killed count too
            step, loss = line.split()
            if step == "ended":
                break
            assert losses.setdefault(int(step), loss) == loss
            steps_left -= 1
            if steps_left == 0:
                time.sleep(draws.random() * 0.03)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process_id), signal.SIGKILL)
        assert step == "ended"
        if attempt == kills:
            assert loss == "0"
        elif is_long:
            assert int(loss) == -signal.SIGKILL
    return losses


@pytest.fixture
def killed(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    runs: subprocess.Popen[str],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    tokens: TokenDataset,
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
    folder: Path,
) -> Callable[..., None]:
    """Kills a run at random moments and compares it with an uninterrupted one."""

    def go(
        kills: int,
        seed: int,
        *,
        phases: tuple[tuple[int, int], ...] = (),
        sparsity: SparsityRequest | None = None,
        lora: LoraRequest | None = None,
    ) -> None:
        width = 32 if sparsity is None else 64
        stack = gpt(dropout=0.1, width=width, device="meta", sparsity=sparsity, lora=lora)
        run_plan = plan(
            stack, micro=2, accumulation=2, precision="bfloat16", recompute="full",
            model=ModelIdentity(name="gpt-tiny", sparsity=sparsity, lora=lora),
        )  # fmt: skip
        run_program = program(run_plan)
        if lora is not None:
            graph = capture_graph(stack)
            run_plan = run_plan.model_copy(update={"graph": graph.label})
            (run_program,) = lower(run_plan, graph)
        if phases:
            graph = capture_graph(stack) if lora else graph_of(dropout=0.1)
            offload = Offload(parameters="disk", gradients="disk", optimizer="disk")
            stages = (Stage(phases=phases),)
            changes = {"graph": graph.label, "offload": offload, "stages": stages}
            run_plan = run_plan.model_copy(update=changes)
            (run_program,) = lower(run_plan, graph)
        is_long = sparsity is not None or lora is not None
        steps = 12 * kills if is_long else 30
        request = settings(steps=steps, save_every=2, keep=2, seed=7)
        data = {"source": tokens.meta.train.source, "tokenizer": "byte", "held_out": 0.2}
        dials = {"layers": 3, "width": width, "heads": 4, "sequence": 16, "vocabulary": 257,
                 "dropout": 0.1}  # fmt: skip
        losses = kill_and_resume(
            runs,
            {
                "data": data,
                "cache": str(tokens.folder.parent),
                "settings": request.model_dump(mode="json"),
                "plan": run_plan.model_dump(mode="json"),
                "program": run_program.model_dump(mode="json"),
                "dials": dials,
                "folder": str(folder / "killed" / "checkpoints"),
            },
            kills,
            seed,
            is_long=is_long,
        )
        context = RankContext(
            plan=run_plan, stack=stack, program=run_program, settings=request,
            checkpoints=folder / "full" / "checkpoints",
        )  # fmt: skip
        full = train_loop(context, batches(seed=7))
        assert losses == {step.step: step.loss.hex() for step in full}
        ends = [
            latest_checkpoint(folder / where / "checkpoints").manifest
            for where in ("killed", "full")
        ]
        assert ends[0] == ends[1]
        assert not list((folder / "killed" / "checkpoints").glob(".*"))

    return go


EACH_LAYER = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))


def test_a_killed_run_resumes_bit_identically(killed: Callable[..., None]):
    killed(2, 1)


@pytest.mark.slow
def test_a_run_killed_twenty_times_resumes_bit_identically(killed: Callable[..., None]):
    killed(20, 2)


def test_a_killed_run_in_phases_resumes_bit_identically(killed: Callable[..., None]):
    killed(2, 3, phases=EACH_LAYER)


@pytest.mark.slow
def test_a_run_killed_in_updates_of_its_masks_resumes_bit_identically(killed: Callable[..., None]):
    killed(1, 5, sparsity=changes_at_every_step("rigl"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["set", "rigl"])
def test_a_run_killed_fifty_times_in_updates_of_its_masks_resumes_bit_identically(
    schedule: str, killed: Callable[..., None]
):
    killed(50, 6, sparsity=changes_at_every_step(schedule))


@pytest.mark.slow
@pytest.mark.parametrize("phases", [(), EACH_LAYER])
def test_a_run_with_adapters_killed_fifty_times_resumes_bit_identically(
    phases: tuple[tuple[int, int], ...], killed: Callable[..., None]
):
    killed(50, 10, lora=LoraRequest(rank=2), phases=phases)


@pytest.mark.slow
def test_a_killed_run_with_a_static_mask_resumes_bit_identically(killed: Callable[..., None]):
    killed(1, 8, sparsity=SparsityRequest(level=0.5, block=16))


def changes_at_every_step(schedule: str) -> SparsityRequest:
    """Half of the blocks are kept, and some are replaced after every step but the last."""
    return SparsityRequest(schedule=schedule, level=0.5, block=16, every=1, until=1)


@pytest.mark.slow
def test_a_run_in_phases_killed_two_hundred_times_resumes_bit_identically(
    killed: Callable[..., None],
):
    killed(200, 4, phases=EACH_LAYER)
