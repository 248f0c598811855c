"""Time of the optimizer: of each, and on other stacks."""

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.capture import stack_graph
from windlass.cost.optimizer_time import norm_launch_seconds, update_seconds
from windlass.hardware import load_machine
from windlass.models import model_config
from windlass.program import layer_kind_state_sizes
from windlass.schema import OWN_STACK, Batch, Parallelism, Plan, Stage
from windlass.stacks import load_stack


def test_a_fused_optimizer_launches_no_kernels_for_each_weight():
    device, nemo = load_machine("dgx-a100-80gb").device, load_stack("nemo")
    device = device.model_copy(update={"launch_seconds": 1e-3})  # more than the work hides
    graph = stack_graph(model_config("gpt2-124m"), nemo)
    block = graph.kinds["block"]
    plan = Plan(
        graph=graph.label, machine="dgx-a100-80gb", precision="bfloat16",
        parallel=Parallelism(), batch=Batch(sequence=1024, micro=1, accumulation=1),
        stages=(Stage(phases=((0, graph.layers),)),),
    )  # fmt: skip

    fused, own = (update_seconds(plan, block, device, stack) for stack in (nemo, OWN_STACK))

    assert norm_launch_seconds(plan, block, device, nemo) == fused.launch == 0
    assert own.launch > 0
    assert fused.update == own.update
    assert update_seconds(plan, block, device) == own


def test_muon_keeps_one_moment_of_a_matrix_and_takes_the_time_of_its_products():
    graph, device = tiny_graph(width=64), tiny_machine().device
    adamw = tiny_plan(graph, tiny_machine())
    muon = adamw.model_copy(update={"optimizer": "muon"})
    block, head = graph.kinds["block"], graph.kinds["head"]

    states = [layer_kind_state_sizes(plan, block).optimizer for plan in (adamw, muon)]
    assert states == [8 * 64**2, 4 * 64**2]
    assert layer_kind_state_sizes(muon, head) == layer_kind_state_sizes(adamw, head)
    # Each of 5 iterations multiplies three pairs of 64 x 64 matrices.
    products = 5 * 3 * 2 * 64**3 / device.rate("bfloat16").curve.at(2 * 64**3)
    assert update_seconds(muon, block, device).update > products
    without = muon.model_copy(update={"optimizer": "lion"})
    assert update_seconds(without, block, device).update < products
