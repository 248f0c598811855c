"""Time of the optimizer on other stacks."""

from windlass.capture import stack_graph
from windlass.cost.optimizer_time import norm_launch_seconds, update_seconds
from windlass.hardware import load_machine
from windlass.models import model_config
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

    assert norm_launch_seconds(block, device, nemo) == fused.launch == 0
    assert own.launch > 0
    assert fused.update == own.update
    assert update_seconds(plan, block, device) == own
