from hypothesis import given, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.program.replicas.zero_sharding import (
    gradient_reduce_group,
    gradient_scatter_group,
    optimizer_shard_index,
    padded_elements,
    parameter_gather_group,
    parameter_shard_index,
    update_gather_group,
)
from windlass.schema.plan import Plan

MACHINE, GRAPH = tiny_machine(devices=64), tiny_graph()


@st.composite
def sharded(draw: st.DrawFn) -> Plan:
    weights, q, blocks = (draw(st.integers(1, 4)) for _ in range(3))
    sharding = (weights, weights * q)
    return tiny_plan(GRAPH, MACHINE, data=weights * q * blocks, sharding=sharding)


@given(plan=sharded())
def test_the_parameter_gather_group_has_every_shard_once_in_order(plan: Plan):
    for replica in range(plan.parallel.data):
        group = parameter_gather_group(replica, plan)
        assert replica in group
        assert [parameter_shard_index(each, plan) for each in group] == list(
            range(plan.sharding.parameters)
        )


@given(plan=sharded())
def test_the_update_gather_group_has_every_part_of_one_parameter_shard_once_in_order(plan: Plan):
    q = plan.sharding.optimizer // plan.sharding.parameters
    for replica in range(plan.parallel.data):
        shard = parameter_shard_index(replica, plan)
        group = update_gather_group(replica, plan)
        assert replica in group
        assert [optimizer_shard_index(each, plan) for each in group] == [
            shard * q + i for i in range(q)
        ]
        assert {parameter_shard_index(each, plan) for each in group} == {shard}


@given(plan=sharded())
def test_a_gradient_shard_is_the_sum_of_all_replicas_each_once(plan: Plan):
    """Scattered within a block, then summed over the same shard of all blocks."""
    for replica in range(plan.parallel.data):
        shards = {
            optimizer_shard_index(each, plan) for each in gradient_reduce_group(replica, plan)
        }
        assert shards == {optimizer_shard_index(replica, plan)}
        summed = [
            each
            for one in gradient_reduce_group(replica, plan)
            for each in gradient_scatter_group(one, plan)
        ]
        assert sorted(summed) == list(range(plan.parallel.data))


@given(plan=sharded())
def test_every_member_of_a_group_finds_the_same_group(plan: Plan):
    for group_of in (
        parameter_gather_group,
        update_gather_group,
        gradient_scatter_group,
        gradient_reduce_group,
    ):
        for replica in range(plan.parallel.data):
            group = group_of(replica, plan)
            assert {group_of(each, plan) for each in group} == {group}


@given(plan=sharded(), elements=st.integers(0, 1000))
def test_a_flat_layer_has_equal_shards_with_less_than_one_element_of_padding_each(
    plan: Plan, elements: int
):
    flat = padded_elements(elements, plan)
    assert flat % plan.sharding.optimizer == 0
    assert 0 <= flat - elements < plan.sharding.optimizer
