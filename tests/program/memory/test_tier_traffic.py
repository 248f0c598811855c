"""What a step moves, against formulas that are written down from the plan alone."""

from collections.abc import Mapping
from itertools import pairwise

from hypothesis import given

from factories import HOST_OFFLOAD, tiny_graph, tiny_machine, tiny_plan
from program.offloaded_plans import offloaded_plans
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.program.memory.tier_traffic import (
    TierTraffic,
    TransferBytes,
    sum_tiers,
)
from windlass.program.tied_weights import tied_owner_layers
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan, Precision

MACHINE = tiny_machine(host="1 GiB")
SQUARE, TABLE = 32 * 32, 64 * 32


def step_total(plan: Plan, graph: Graph) -> Mapping[str, TransferBytes]:
    (program,) = lower(plan, graph)
    return TierTraffic(plan, graph).total(program.instructions)


def deferred(precision: Precision, accumulation: int = 2):
    """A plan of three phases with deferred updates, its graph and its traffic."""
    graph = tiny_graph(layers=4, tied=False)
    plan = tiny_plan(
        graph, MACHINE, offload=HOST_OFFLOAD, phases=((0, 1), (1, 3), (3, 6)), precision=precision,
        accumulation=accumulation,
    )  # fmt: skip
    traffic = TierTraffic(plan, graph)
    return plan, graph, traffic


def test_float32_weights_are_their_own_master_weights():
    _, _, traffic = deferred("float32")
    (tier,) = traffic.instruction_traffic(Instruction("update", 2))
    assert tier == "host"
    # Reads moments, master weights and the stored gradient; writes all but the gradient.
    assert traffic.instruction_traffic(Instruction("update", 2))[tier] == (
        SQUARE * (8 + 4 + 4),
        SQUARE * 12,
    )
    assert traffic.instruction_traffic(Instruction("update", 0))[tier] == (TABLE * 12, TABLE * 12)
    assert traffic.instruction_traffic(Instruction("prefetch_weights", 2))[tier] == (SQUARE * 4, 0)
    assert traffic.instruction_traffic(Instruction("offload_grads", 2))[tier] == (0, SQUARE * 4)
    assert traffic.instruction_traffic(Instruction("free_weights", 2)) == {}


def test_bfloat16_weights_are_written_with_their_master_weights():
    _, _, several = deferred("bfloat16", accumulation=2)
    assert several.instruction_traffic(Instruction("update", 2))["host"] == (
        SQUARE * (12 + 4),
        SQUARE * (12 + 2),
    )
    assert several.instruction_traffic(Instruction("update", 0))["host"] == (
        TABLE * 12,
        TABLE * (12 + 2),
    )
    assert several.instruction_traffic(Instruction("prefetch_weights", 2))["host"] == (
        SQUARE * 2,
        0,
    )
    assert several.instruction_traffic(Instruction("offload_grads", 2))["host"] == (0, SQUARE * 4)
    _, _, once = deferred("bfloat16", accumulation=1)
    assert once.instruction_traffic(Instruction("update", 2))["host"] == (
        SQUARE * (12 + 2),
        SQUARE * (12 + 2),
    )
    assert once.instruction_traffic(Instruction("offload_grads", 2))["host"] == (0, SQUARE * 2)


def test_a_deferred_update_without_a_stored_gradient_only_fetches_weights():
    _, _, traffic = deferred("float32")
    assert traffic.instruction_traffic(Instruction("update", 2), stored=False)["host"] == (
        SQUARE * 4,
        0,
    )
    assert traffic.instruction_traffic(Instruction("update", 0), stored=False)["host"] == (
        TABLE * 12,
        TABLE * 12,
    )


def test_weights_of_an_offloaded_optimizer_are_not_transferred():
    graph = tiny_graph(layers=1)
    for precision, state in (("float32", 12), ("bfloat16", 12)):
        plan = tiny_plan(graph, MACHINE, offload=Offload(optimizer="host"), precision=precision)
        update = Instruction("update", 1)
        moved = sum_tiers(TierTraffic(plan, graph).instruction_traffic(update))
        assert moved == (SQUARE * state, SQUARE * state)


def test_a_step_in_three_phases_transfers_what_is_counted_by_hand():
    plan, graph, _ = deferred("float32")
    first, middle, last = TABLE, 2 * SQUARE, 2 * SQUARE + TABLE  # parameters of each phase
    read = 16 * (middle + last) + 12 * first  # updates
    read += 4 * (first + middle)  # fetched for backward: the last phase is there still
    written = 12 * (first + middle + last) + 4 * (middle + last)
    assert step_total(plan, graph) == {"host": (read, written)}


@given(drawn=offloaded_plans(parameters=True, trained=True))
def test_a_step_transfers_what_the_formula_says(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    tiers: dict[str, list[int]] = {}

    def add(tier: str, read: int, written: int) -> None:
        total = tiers.setdefault(tier, [0, 0])
        total[0] += read
        total[1] += written

    master = 4 if plan.precision == "float32" else 0
    phases, offload, kinds = plan.stages[0].phases, plan.offload, list(graph.layer_kinds())
    for layer, kind in enumerate(kinds):
        n = kind.parameter_count
        away = layer >= phases[0][1]
        state = sum(plan.state_bytes(p.count) for p in kind.parameters if p.tied_to is None)
        add(offload.optimizer, state, state)
        fetches = _fetches(plan, graph, layer)
        add(
            offload.parameters,
            n * (master + fetches * plan.parameter_itemsize),
            n * plan.parameter_itemsize,
        )
        if away and plan.clip:  # one of the fetches is the update's own
            add(offload.parameters, -n * plan.parameter_itemsize, 0)
            add(offload.gradients, n * plan.gradient_itemsize, n * plan.gradient_itemsize)
    if plan.is_offloaded("activations"):
        width = plan.batch.micro * plan.batch.sequence * 32 * plan.parameter_itemsize
        # Outputs between recomputed layers: all layers before the last phase are recomputed.
        travels = phases[-1][0] - 1
        moved_bytes = width * travels * plan.batch.accumulation
        add(offload.activations, moved_bytes, moved_bytes)
    expected = {tier: tuple(total) for tier, total in tiers.items() if any(total)}
    assert step_total(plan, graph) == expected


def _fetches(plan: Plan, graph: Graph, layer: int) -> int:
    """How often a layer is fetched: each time a phase uses it that the phase before did not.

    Phases run in order, forward and back, and the layers of the first one are resident.
    """
    tied_owners = tied_owner_layers(graph)
    phases = plan.stages[0].phases
    used = [
        any(layer == at or layer in tied_owners[at] for at in range(*phase)) for phase in phases
    ]
    turns = [*used, *reversed(used[:-1])]
    return sum(now and not before for before, now in pairwise(turns))


@given(drawn=offloaded_plans(parameters=True))
def test_a_step_transfers_no_more_model_state_for_more_micro_batches(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    plan = plan.model_copy(
        update={"offload": plan.offload.model_copy(update={"activations": "device"})}
    )
    more = plan.batch.model_copy(update={"accumulation": plan.batch.accumulation + 3})
    few = plan.batch.model_copy(update={"accumulation": max(2, plan.batch.accumulation)})
    totals = [
        sum_tiers(step_total(plan.model_copy(update={"batch": batch}), graph))
        for batch in (few, more)
    ]
    assert totals[0] == totals[1]
