"""Replicas that divide experts: what each holds, exchanges and reduces, in closed form."""

from itertools import product

import pytest

from factories import expert_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors, PlanError
from windlass.program.communication_volume import CommunicationVolume
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import plan_layer_sizes, plan_state_sizes
from windlass.program.replicas.expert_parallel import rank_kinds
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.deadlock import verify_communication
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.plan import Offload, Plan

EXPERTS, WIDTH, BLOCK = 12, 32, 1
GRAPH = expert_graph(experts=EXPERTS, width=WIDTH)
MACHINE = tiny_machine(devices=64)
OF_EXPERTS = 2 * EXPERTS * WIDTH * WIDTH
OF_ROUTER = EXPERTS * WIDTH
STATE_BYTES, ITEM = 8, 4


def plan_of(expert: int, data: int = 4, sharding: tuple[int, int] = (1, 1)) -> Plan:
    return tiny_plan(GRAPH, MACHINE, data=data, expert=expert, sharding=sharding)


@pytest.mark.parametrize(("expert", "shards"), list(product([1, 2, 4], repeat=2)))
def test_a_rank_keeps_the_state_of_its_experts_or_of_its_shard_whichever_is_less(
    expert: int, shards: int
):
    sizes = plan_layer_sizes(plan_of(expert, sharding=(1, shards)), GRAPH)[BLOCK]
    others, experts = OF_ROUTER // shards, OF_EXPERTS // max(expert, shards)
    assert sizes.optimizer == STATE_BYTES * (others + experts)
    assert sizes.gradient_shard == ITEM * (others + experts)
    assert sizes.weights == ITEM * (OF_ROUTER + OF_EXPERTS // expert)


@pytest.mark.parametrize("expert", [2, 4])
def test_gradients_of_experts_are_reduced_over_the_replicas_that_hold_the_same(expert: int):
    volume = CommunicationVolume(plan_of(expert), GRAPH)
    copies = 4 // expert
    others = 2 * 3 * ITEM * OF_ROUTER // 4
    experts = 2 * (copies - 1) * ITEM * OF_EXPERTS // expert // copies
    assert volume.sent_bytes(Instruction("reduce_grads", BLOCK)) == others + experts


@pytest.mark.parametrize("expert", [2, 3, 4, 6])
def test_each_pass_exchanges_every_token_with_both_of_its_experts_there_and_back(expert: int):
    plan = plan_of(expert, data=12)
    tokens = plan.batch.micro * plan.batch.sequence
    exchange = ITEM * 2 * tokens * WIDTH * (expert - 1) // expert
    counts = 8 * EXPERTS * (expert - 1) // expert
    volume = CommunicationVolume(plan, GRAPH)
    assert volume.sent_bytes(Instruction("backward", BLOCK, 0)) == 2 * exchange
    assert volume.sent_bytes(Instruction("forward", BLOCK, 0)) == 2 * exchange + counts
    assert volume.sent_bytes(Instruction("forward", 0, 0)) == 0


def test_a_rank_multiplies_as_much_as_one_that_has_all_experts():
    """It has e times the tokens of `1 / e` of the experts, and reads as many weights less."""
    plan = plan_of(4)
    for name, kind in rank_kinds(plan, GRAPH).items():
        for cost, whole in zip(kind.costs, GRAPH.kinds[name].costs, strict=True):
            for ops, full in ((cost.forward, whole.forward), (cost.backward, whole.backward)):
                own = [op for op in ops if op.kind == "matmul"]
                for op, other in zip(own, [o for o in full if o.kind == "matmul"], strict=True):
                    assert op.flop == other.flop
                    assert elements(op.shape) == pytest.approx(elements(other.shape))


def elements(shape: tuple) -> float:
    batch, m, n, k = (side.at(2, 16) for side in shape)
    return batch * m * n * k


def test_one_expert_group_leaves_the_graph_as_it_was_captured():
    assert rank_kinds(plan_of(1), GRAPH) == dict(GRAPH.kinds)
    assert all(sizes.experts is None for sizes in plan_state_sizes(plan_of(1), GRAPH))


def test_ranks_that_divide_experts_deadlock_if_their_passes_are_in_another_order():
    plan = tiny_plan(GRAPH, MACHINE, data=4, expert=2, micro=1, accumulation=2, schedule="gpipe")
    programs = lower(plan, GRAPH)
    verify_programs(programs, plan, GRAPH, {})
    own = list(programs[1].instructions)
    places = [own.index(Instruction("forward", BLOCK, micro)) for micro in (0, 1)]
    own[places[0]], own[places[1]] = own[places[1]], own[places[0]]
    swapped = programs[1].model_copy(update={"instructions": tuple(own)})
    with pytest.raises(PlanError, match="waits for the devices of its group forever"):
        verify_communication((programs[0], swapped, *programs[2:]), plan, GRAPH)
    alone = plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"expert": None})})
    verify_communication((programs[0], swapped, *programs[2:]), alone, GRAPH)


def errors_of(plan: Plan, graph: Graph = GRAPH) -> tuple[str, ...]:
    return plan_errors(plan.model_copy(update={"graph": graph.label}), graph, MACHINE)


def test_what_does_not_combine_is_said_in_a_sentence_each_and_all_at_once():
    parallel = plan_of(2).parallel.model_copy(update={"expert": 8, "data": 12})
    plan = plan_of(2).model_copy(
        update={"parallel": parallel, "optimizer": "lamb", "offload": Offload(optimizer="device")}
    )
    found = errors_of(plan)
    assert len(found) == 3
    assert "does not divide the 12 experts of `experts`; choose a divisor" in found[0]
    assert "does not divide `parallel.data` = 12" in found[1]
    assert "with `train.optimizer` = lamb, which this version does not combine" in found[2]


def test_a_dense_model_has_no_experts_to_divide():
    graph = tiny_graph(layers=4)
    (found,) = errors_of(tiny_plan(graph, MACHINE, data=2, expert=2), graph)
    assert "`tiny` has no experts to divide" in found


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_and_expert_groups_of_which_neither_divides_the_other_are_refused(shards: int):
    found = errors_of(plan_of(3, data=12, sharding=(1, shards)))
    assert any("one of them must be a multiple of the other" in each for each in found)
    with pytest.raises(InputErrors):
        lower(plan_of(3, data=12, sharding=(1, shards)), GRAPH)
