import pytest
from hypothesis import given

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from program.offloaded_plans import offloaded_plans
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import layer_kind_sizes
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.program.memory.tier_traffic import TierTraffic
from windlass.schema.graph import Graph
from windlass.schema.plan import MomentFormat, Offload, Plan

MACHINE = tiny_machine(host="1 GiB")
SQUARE, TABLE = 32 * 32, 64 * 32
PHASES = ((0, 1), (1, 3), (3, 4))


def test_a_plan_without_offloading_has_no_offloaded_bytes():
    graph = tiny_graph()
    assert offloaded_bytes_by_tier(tiny_plan(graph, MACHINE), graph) == {}


def test_each_class_is_in_its_own_tier():
    graph = tiny_graph(layers=2, tied=False)
    offload = Offload(parameters="host", gradients="disk", optimizer="disk")
    plan = tiny_plan(graph, MACHINE, offload=offload, phases=PHASES)
    owned, waiting = 2 * TABLE + 2 * SQUARE, TABLE + 2 * SQUARE
    assert offloaded_bytes_by_tier(plan, graph) == {
        "host": {"parameters": 4 * owned},
        "disk": {"gradients": 4 * waiting, "optimizer": 8 * owned},
    }


def test_bfloat16_master_weights_are_stored_with_the_optimizer_state():
    graph = tiny_graph(layers=2, tied=True)
    plan = tiny_plan(
        graph, MACHINE, offload=HOST_OFFLOAD, phases=PHASES, precision="bfloat16", clip=False
    )
    owned = TABLE + 2 * SQUARE
    assert offloaded_bytes_by_tier(plan, graph) == {
        "host": {"parameters": 2 * owned, "optimizer": 12 * owned, "gradients": 0}
    }


@pytest.mark.parametrize(("moments", "each"), [("float32", 8), ("bfloat16", 4), ("int8", 2)])
def test_moments_in_fewer_bits_take_less_space_and_traffic(moments: MomentFormat, each: int):
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(graph, MACHINE, offload=HOST_OFFLOAD, phases=PHASES, moments=moments)
    owned = 2 * TABLE + 2 * SQUARE
    scales = 2 * 4 * owned // 256 if moments == "int8" else 0
    assert offloaded_bytes_by_tier(plan, graph)["host"]["optimizer"] == each * owned + scales
    update = TierTraffic(plan, graph).instruction_traffic(Instruction("update", 0))["host"]
    assert update.read == update.written == (each + 4) * TABLE + scales * TABLE // owned


@pytest.mark.parametrize("accumulation", [1, 2])
def test_waiting_gradients_reuse_the_space_of_weight_copies(accumulation: int):
    graph = tiny_graph(layers=2, tied=False)
    plan = tiny_plan(
        graph,
        MACHINE,
        offload=HOST_OFFLOAD,
        phases=PHASES,
        precision="bfloat16",
        accumulation=accumulation,
    )
    owned, waiting = 2 * TABLE + 2 * SQUARE, TABLE + 2 * SQUARE
    offloaded = offloaded_bytes_by_tier(plan, graph)["host"]
    assert offloaded["parameters"] == 2 * owned
    assert offloaded["gradients"] == (plan.gradient_itemsize - 2) * waiting
    separate = plan.model_copy(
        update={"offload": HOST_OFFLOAD.model_copy(update={"gradients": "disk"})}
    )
    assert (
        offloaded_bytes_by_tier(separate, graph)["disk"]["gradients"]
        == plan.gradient_itemsize * waiting
    )


@given(drawn=offloaded_plans(parameters=True))
def test_nothing_reads_weights_between_the_offload_of_their_gradient_and_their_update(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    (program,) = lower(plan, graph)
    waiting_layers: set[int | None] = set()
    # Two steps and a flush of deferred updates: all that may follow a step.
    for kind, layer, _ in (
        *program.instructions,
        *program.instructions,
        *program.flush_deferred_updates,
    ):
        if kind == "offload_grads":
            waiting_layers.add(layer)
        elif kind == "update":
            waiting_layers.discard(layer)
        elif kind == "prefetch_weights":
            assert layer not in waiting_layers
    assert not waiting_layers


@given(drawn=offloaded_plans())
def test_offloaded_outputs_take_as_much_as_a_program_ever_holds(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    (program,) = lower(plan, graph)
    kinds = list(graph.layer_kinds())
    current = peak = 0
    for kind, layer, _ in program.instructions:
        if kind in ("offload_activation", "reload_activation") and layer is not None:
            size = layer_kind_sizes(plan, kinds[layer]).output
            current += size if kind == "offload_activation" else -size
            peak = max(peak, current)
    assert current == 0
    if plan.is_offloaded("activations"):
        assert offloaded_bytes_by_tier(plan, graph)[plan.offload.activations]["activations"] == peak
