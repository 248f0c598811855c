"""Mutants of the translation to torch's parts: each is noticed where a proof would notice it.

Each is a line of `engines/torch` changed, in a copy that only the ranks import.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import windlass
from rank_pool import RankPool, RankProcesses
from torch_plans import torch_plan
from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.checkpoint import checkpoint_name
from windlass.schema import CHECKPOINT_FOLDER
from windlass.schema.plan import Plan

ROUNDING = 1e-9


class Mutant(NamedTuple):
    """A change of one place, and the plan of two ranks that shows it."""

    file: str
    old: str
    new: str
    degrees: dict[str, Any]


SHARDS: dict[str, Any] = {"data": 2, "sharding": (2, 2)}
REPLICAS: dict[str, Any] = {"data": 2}
STAGES: dict[str, Any] = {"pipeline": 2}
TENSOR: dict[str, Any] = {"tensor": 2}

MUTANTS = {
    "gradients are averaged over shards": Mutant(
        "weights", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)", SHARDS
    ),
    "gradients are reduced after the first micro-batch only": Mutant(
        "passes", "micro == self._micro_batches - 1", "micro == 0", SHARDS
    ),
    "a schedule averages over micro-batches": Mutant(
        "passes", "loss_fn=_weighted, scale_grads=False)\n", "loss_fn=_weighted)\n", STAGES
    ),
    "losses of a micro-batch weigh as those of the first": Mutant(
        "passes", "weights[micro : micro + 1]", "weights[:1] * 2", REPLICAS
    ),
    "whole weights of tensor-parallel ranks are not summed": Mutant(
        "optimizer", "if each.is_whole]", "if each.is_whole][:1]", TENSOR
    ),
    "copies of a tied weight are not summed": Mutant(
        "optimizer", "if weight.group is not None:", "if False:", STAGES
    ),
    "the norm counts every replica": Mutant(
        "optimizer", "self._ranks.replica > 0, self", "False, self", REPLICAS
    ),
    "the norm counts a tied weight on each stage": Mutant(
        "optimizer", "is_replica or weight.is_copy or", "is_replica or", STAGES
    ),
    "the norm counts whole weights on each tensor-parallel rank": Mutant(
        "optimizer", "self._ranks.coord.tensor_rank > 0", "False", TENSOR
    ),
    "gradients are not clipped": Mutant(
        "optimizer", "if divisor is not None:", "if not divisor:", SHARDS
    ),
    "the rate is that of the next step": Mutant(
        "optimizer", "(self._settings, step)", "(self._settings, step + 1)", SHARDS
    ),
    "everything decays": Mutant("weights", "len(self.shard.full_shape) >= _MATRIX", "True", SHARDS),
    "both replicas take the same samples": Mutant(
        "engine", "self.dist.coord.data_rank, self.dist.context)", "0, self.dist.context)", REPLICAS
    ),
    "each tensor-parallel rank counts the loss": Mutant(
        "engine", "totals, losses, self._broken, self.experts, self.dist, stop",
        "totals * totals.new_tensor((1, self.dist.tensor_parallel.degree, 1)), losses, "
        "self._broken, self.experts, self.dist, stop", TENSOR
    ),
    "dropout forgets the micro-batch": Mutant(
        "step_data", "inputs.sample_keys(micro)", "inputs.sample_keys(0)", STAGES
    ),
    "layers share one dropout mask": Mutant(
        "step_data", "layer=self._keys[index]", "layer=self._keys[1]", STAGES
    ),
    "a rank's part of a weight is its neighbour's": Mutant(
        "weights", "layer_sharding(stack, index), self._ranks.tensor_parallel",
        "layer_sharding(stack, index), "
        "type(self._ranks.tensor_parallel)(degree=self._ranks.tensor_parallel.degree)", TENSOR,
    ),
}  # fmt: skip
"""Mutants of a run from its start."""

RESUMED = {
    "moments are not loaded": Mutant(
        "state", "local_shard(moment.detach())", "local_shard(moment.detach()).clone()", SHARDS
    ),
    "counts of updates are not loaded": Mutant(
        "state", "TensorPart((), steps)", "TensorPart((), steps.clone())", SHARDS
    ),
    "each rank loads the first shard": Mutant(
        "state", "return min(rows, ranks.shard *", "return min(rows, 0 *", SHARDS
    ),
}  # fmt: skip
"""Mutants of a run that goes on from a checkpoint."""


@contextmanager
def mutated(mutant: Mutant, folder: Path, pool: RankPool) -> Iterator[None]:
    """Ranks of a pool that import a copy with the change."""
    package = Path(windlass.__file__).parent
    for part in package.iterdir():
        if part.name != "engines":
            (folder / "windlass").mkdir(exist_ok=True)
            (folder / "windlass" / part.name).symlink_to(part)
    engine = folder / "windlass" / "engines" / "torch"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").touch()
    for file in (package / "engines" / "torch").glob("*.py"):
        text = file.read_text()
        if file.stem == mutant.file:
            assert text.count(mutant.old) >= 1
            text = text.replace(mutant.old, mutant.new)
        (engine / file.name).write_text(text)
    healthy, pool.processes = pool.processes, RankProcesses(2, source=folder)
    try:
        yield
    finally:
        pool.processes.close()
        pool.processes = healthy


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_translation_is_found(name: str, pool: RankPool, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    plan = torch_plan(pool, **mutant.degrees)
    assert pool.verify(plan)[0].passed
    with mutated(mutant, tmp_path, pool):
        print(first_difference(pool, plan))


def first_difference(pool: RankPool, plan: Plan) -> str:
    """In what a plan differs from one device, or why its checkpoint cannot be read."""
    run = pool.run(plan)
    try:
        result = pool.compared(run, plan)
    except CheckpointError as error:
        return str(error)
    assert not result.passed
    return str(result.first_mismatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_mutant_of_a_resume_is_found(name: str, pool: RankPool, tmp_path: Path) -> None:
    mutant = RESUMED[name]
    plan = torch_plan(pool, **mutant.degrees)
    saved = pool.run(plan).folder / CHECKPOINT_FOLDER / checkpoint_name(1)
    with mutated(mutant, tmp_path, pool):
        steps = pool.run(plan, resume=saved).steps
    expected = pool.single_device_run("float64").steps[1:]
    pairs = [(step.loss, step.gradient_norm) for step in steps]
    assert pairs != pytest.approx(
        [(step.loss, step.gradient_norm) for step in expected], rel=ROUNDING
    )
