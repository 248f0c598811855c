"""Memory of each layer over a program, beside the memory of all of them."""

from hypothesis import given, settings

from program.distributed_plans import distributed_plans
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_memory import memory_by_layer
from windlass.program.memory.liveness import memory_profile
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


@given(drawn=distributed_plans())
@settings(max_examples=15)
def test_layers_together_take_what_the_device_has_in_use(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    for program in lower(plan, graph):
        uses = memory_by_layer(program, plan, graph)
        held = {layer: each[0].after for layer, each in uses.items()}
        changes = [(use, layer) for layer, each in uses.items() for use in each[1:]]

        expected = memory_profile(program, plan, graph).bytes_by_instruction
        for index, nbytes in enumerate(expected):
            now = {layer: use for use, layer in changes if use.instruction == index}
            during = held | {layer: use.during for layer, use in now.items()}
            held |= {layer: use.after for layer, use in now.items()}
            assert sum(during.values()) == nbytes
