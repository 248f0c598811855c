"""The working space of an update of whole matrices."""

import pytest
import torch
from torch.backends import mkldnn

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.program.instruction import Instruction
from windlass.program.memory.effects import InstructionEffects
from windlass.runtime.optimizer_state.optimizer_state import StateFormat
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import new_master_parameter
from windlass.schema import TrainSettings, optimizer_law
from windlass.torch_ext import device_for

SMALL = 0.02
"""Share of the working space that numbers and vectors beside the matrices may take."""


def allocated_by_update(rows: int, columns: int) -> int:
    """Most bytes above those at the start of one update, as torch's profiler saw them."""
    settings = TrainSettings(steps=2, batch=1, sequence=2, optimizer="muon")
    master = torch.randn(rows, columns)
    state = StateFormat(optimizer_law("muon"))
    weight = new_master_parameter("w", master, master, state, decays=True, matrix=True)
    optimizer = Optimizer(settings, device_for("cpu"))
    weight.gradient = torch.randn(rows, columns)
    held = weight.gradient  # as in a step, which frees it when the update has ended
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.no_grad(),
        # What oneDNN takes beside tensors depends on the processor's instructions.
        mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None),
        torch.profiler.profile(activities=activities, profile_memory=True) as run,
    ):
        optimizer.update([weight], 1, torch.tensor(2.0))
    del held
    current = peak = 0
    changes = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in changes):
        current += change
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (128, 512), (512, 128)])
def test_the_working_space_of_muon_is_what_torch_allocates(rows: int, columns: int):
    predicted = optimizer_law("muon").workspace_bytes(rows, columns, 4)
    assert allocated_by_update(rows, columns) == pytest.approx(predicted, rel=SMALL)
    assert optimizer_law("lamb").workspace_bytes(rows, columns, 4) == 0


def test_the_predicted_memory_of_an_update_holds_the_space_of_its_largest_matrix():
    graph = tiny_graph(width=64)
    plan = tiny_plan(graph, tiny_machine())
    muon = plan.model_copy(update={"optimizer": "muon"})
    update = Instruction("update", 1)
    both = [InstructionEffects(each, graph).effect_of(update, set()) for each in (plan, muon)]
    largest = max(graph.kinds["block"].matrices, key=lambda each: each.count)
    space = optimizer_law("muon").workspace_bytes(*largest.shape, 4)
    assert [effect.working_bytes for effect in both] == [0, space]
