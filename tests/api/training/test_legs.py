"""Runs whose weights change their shapes: each leg has a plan of its own, and one record.

`pytest -m slow tests/api/training/test_legs.py` also kills runs 25 times each and runs legs on
several ranks, which takes about four minutes on two cores.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

import windlass
from command_line import TINY
from forked_runs import forking_process
from windlass.errors import PlanError
from windlass.jobs.data import prepare_tokens
from windlass.program.lowering.lower import lower
from windlass.report import record_table
from windlass.runtime.checkpoint.checkpoint import Checkpoint, verify_checkpoint
from windlass.runtime.rank_context import RankContext
from windlass.runtime.sparsity.convert_layers import convert_checkpoint
from windlass.runtime.sparsity.mask_updates import sparse_modules
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.tracking.run_reader import RunRecord
from windlass.training.inputs.batches import make_batches

MODEL, *DIALS = TINY
SPARSE = ["model.width=64", "sparsity.level=0.5", "sparsity.block=16"]


def overrides(home: Path, schedule: str, *more: str) -> list[str]:
    source = f"data.source={home / 'text'}"
    return [*DIALS, source, *SPARSE, f"sparsity.schedule={schedule}", *more]


def losses(record: RunRecord) -> dict[int, float]:
    return {step.step: step.loss for step in record.steps}


def masks_of(checkpoint: Path) -> dict[str, set[tuple[int, int]]]:
    """Row and column of each kept block, by the name of the layer."""
    tensors = {
        k: v for file in checkpoint.glob("*.safetensors") for k, v in load_file(file).items()
    }
    return {
        name.removeprefix("buffer/").removesuffix(".blocks"): set(map(tuple, tensor.tolist()))
        for name, tensor in tensors.items()
        if name.endswith(".blocks")
    }


def shown(record: RunRecord) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(record_table(record))
    return capture.get()


def test_then_dense_goes_on_as_a_dense_run_from_the_converted_weights(home: Path) -> None:
    words = overrides(home, "then-dense", "train.steps=6", "sparsity.until=0.5", "train.keep=9")

    run = windlass.train(MODEL, *words, root=home / "runs")
    notes = run.notes
    steps = list(run)

    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    record = windlass.load(run.folder)
    assert (record.state, record.attempts, record.faults) == ("finished", 2, ())
    assert [step.step for step in record.current_plan_steps] == [4, 5, 6]
    assert record.plan == run.planned.plan
    assert any("leg 1 (dense, steps 4 to 6): predicted" in note for note in notes)
    assert "leg 0 (0.5 absent, steps 1 to 3)" in shown(record)
    assert "leg 1 (dense, steps 4 to 6)" in shown(record)
    checkpoints = run.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    assert "".join(windlass.sample(run.folder, "3 times ", tokens=3))
    # Beside it the same training of a dense model, which is given the converted weights.
    dense = windlass.plan(MODEL, *(word for word in words if not word.startswith("sparsity.")))
    sparse, last = windlass.plan(MODEL, *words), checkpoints / "step-00000003"
    converted = convert_checkpoint(
        Checkpoint(path=last, manifest=verify_checkpoint(last)),
        sparse.objects.stack(sparse.request.model_identity, seed=None),
        dense.objects.stack(dense.request.model_identity, seed=None),
        home / "converted",
        graph=dense.plan.graph,
    )
    context = RankContext(
        plan=dense.plan,
        stack=dense.objects.stack(dense.request.model_identity, seed=0),
        program=lower(dense.plan, dense.graph)[0],
        settings=dense.request.train,
        checkpoints=home / "dense",
    )
    batches = make_batches(dense, prepare_tokens(dense.request, None))
    expected = {step.step: step.loss for step in train_loop(context, batches, resume=converted)}
    assert expected == {step: loss for step, loss in losses(record).items() if step > 3}


def test_gradual_keeps_fewer_weights_in_each_leg_and_ends_at_its_level(home: Path) -> None:
    saved = ("train.steps=10", "train.save_every=1", "train.keep=10", "sparsity.until=0.8")
    words = overrides(home, "gradual", *saved)

    run = windlass.train(MODEL, *words, root=home / "runs")
    list(run)

    record = windlass.load(run.folder)
    assert (record.state, record.attempts, record.faults) == ("finished", 5, ())
    attempts = [record.folder / "attempts" / str(n) / "plan.toml" for n in range(1, 5)]
    plans = [Plan.load(path) for path in attempts] + [record.plan]
    graphs = [plan.graph for plan in plans]
    masks = [masks_of(path) for path in sorted((run.folder / "checkpoints").iterdir())]
    assert graphs[0] != graphs[1]
    assert [plan.model.sparsity.leg for plan in plans] == [0, 1, 2, 3, 4]
    assert len(masks) == 10
    assert masks[0] == masks[1] == {}
    for step in range(3, 10):  # masks[step] is that after step + 1; each leg has two steps
        before, after = masks[step - 1], masks[step]
        assert before.keys() == after.keys() != set()
        assert all(after[name] <= before[name] for name in after)
        assert step % 2 == 0 or before == after
    final = windlass.plan(MODEL, *overrides(home, "static", *saved))
    stack = final.objects.stack(final.request.model_identity, seed=None)
    counts = {
        f"block0.{path}": sum(part.rows * part.kept for part in module.parts)
        for path, module in sparse_modules(stack.layers[1])
    }
    assert {name: len(blocks) for name, blocks in masks[-1].items()} == counts
    assert graphs[-1] == final.graph.label


def test_a_run_begins_with_its_first_leg_and_on_one_host(home: Path) -> None:
    words = overrides(home, "then-dense", "train.steps=6", "sparsity.leg=1")
    with pytest.raises(PlanError, match=r"step 1 of the run is in leg 0 .*set `sparsity.leg` = 0"):
        windlass.train(MODEL, *words, root=home / "runs")
    planned = windlass.plan(MODEL, *overrides(home, "gradual", "train.steps=6"))
    with pytest.raises(PlanError, match=r"plans anew in the middle of a run"):
        windlass.launch(planned, nodes=1, per_node=1, root=home / "runs")
    assert not (home / "runs").exists()


def test_a_run_from_another_one_keeps_the_layers_that_it_ended_with(home: Path) -> None:
    words = overrides(home, "then-dense", "train.steps=4", "sparsity.until=0.5")
    parent = windlass.train(MODEL, *words, root=home / "runs")
    list(parent)

    child = windlass.train(parent=parent.folder, root=home / "runs")
    first = next(iter(child))

    assert child.planned.request.sparsity is None
    assert first.step == 1
    assert first.loss < windlass.load(parent.folder).steps[0].loss


@pytest.fixture(scope="module")
def processes() -> Iterator[subprocess.Popen[str]]:
    """A process that forks a run for each line that it is given; see `killed_legs.py`."""
    with forking_process(Path(__file__).with_name("killed_legs.py")) as process:
        yield process


def killed_losses(
    processes: subprocess.Popen[str], job: dict[str, object], kills: int, draws: random.Random
) -> dict[int, float]:
    """Losses of a run that is killed so many times at random moments, and then runs to its end.

    A third of the kills come before an attempt's first step, when a leg is planned and converted.
    """
    seen: dict[int, float] = {}
    for attempt in range(kills + 1):
        processes.stdin.write(f"{json.dumps(job)}\n")
        processes.stdin.flush()
        key, process_id = processes.stdout.readline().split()
        assert key == "process"
        steps_left = draws.randrange(3) if attempt < kills else 10**9
        if steps_left == 0:
            kill_soon(int(process_id), draws)
        for line in processes.stdout:
            step, loss = line.split()
            if step == "ended":
                break
            assert seen.setdefault(int(step), float.fromhex(loss)) == float.fromhex(loss)
            steps_left -= 1
            if steps_left == 0:
                kill_soon(int(process_id), draws)
        assert (step, loss) == ("ended", "0" if attempt == kills else str(-signal.SIGKILL))
    return seen


def kill_soon(process_id: int, draws: random.Random) -> None:
    time.sleep(draws.random() * 0.4)
    os.kill(process_id, signal.SIGKILL)


def compare_killed_run(
    home: Path, processes: subprocess.Popen[str], schedule: str, kills: int, seed: int
) -> None:
    steps = f"train.steps={10 + 40 * kills}"
    words = overrides(home, schedule, steps, "train.save_every=1", "train.evaluate_every=1000")
    whole = windlass.train(MODEL, *words, root=home / "runs")
    list(whole)
    environment = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    job = {"model": MODEL, "overrides": words, "folder": str(home / "killed"), "env": environment}
    seen = killed_losses(processes, job, kills, random.Random(seed))
    record = windlass.load(home / "killed")
    assert record.state == "finished"
    assert losses(record) == losses(windlass.load(whole.folder))
    assert seen.items() <= losses(record).items()
    ends = [max((folder / "checkpoints").iterdir()) for folder in (whole.folder, record.folder)]
    manifests = [verify_checkpoint(end) for end in ends]
    assert manifests[0].files == manifests[1].files


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["then-dense", "gradual"])
def test_a_run_of_legs_killed_twenty_five_times_resumes_bit_identically(
    home: Path, processes: subprocess.Popen[str], schedule: str
) -> None:
    compare_killed_run(home, processes, schedule, 25, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ["parallel.data=2", "sharding.optimizer=2"],
        ["parallel.tensor=2"],
        ["parallel.pipeline=2"],
    ],
)
def test_legs_on_several_ranks_are_those_of_one_device(home: Path, parallel: list[str]) -> None:
    words = overrides(home, "then-dense", "train.steps=6", "batch.micro=1")
    single = windlass.train(MODEL, *words, root=home / "runs")
    list(single)

    several = windlass.train(MODEL, *words, *parallel, root=home / "runs")
    list(several)

    record = windlass.load(several.folder)
    assert (record.state, record.attempts, record.faults) == ("finished", 2, ())
    assert losses(record) == pytest.approx(losses(windlass.load(single.folder)), rel=1e-5)
