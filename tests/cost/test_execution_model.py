"""Machines that overlap communication with computation, and bulk-synchronous machines."""

import pytest
from hypothesis import given

from factories import tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import MACHINE, distributed_plans
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.device_rates import DeviceRates, OpContext
from windlass.cost.op_time import exposed_seconds
from windlass.cost.predict import predict_plan
from windlass.program import plan_state_sizes
from windlass.schema.graph import Graph
from windlass.schema.machine import Link, Machine
from windlass.schema.machine.stack import Stack
from windlass.schema.plan import Offload, Plan

SLOW = 10.0
"""Seconds of a message."""
NEARLY = 1e-3
"""Computing of all layers takes less than a ten-thousandth of that."""
STREAMED = Offload(parameters="host", gradients="host", optimizer="host")


def in_turn(machine: Machine, *, moving_share: float = 0.0) -> Machine:
    """The same machine with a bulk-synchronous execution model."""
    device = machine.device.model_copy(update={"moving_share": moving_share})
    return machine.model_copy(update={"execution_model": "bulk-synchronous", "device": device})


@given(drawn=distributed_plans())
def test_a_bulk_synchronous_machine_is_never_faster(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    beside, after = (predict_plan(plan, graph, each) for each in (MACHINE, in_turn(MACHINE)))
    assert after.step_seconds >= beside.step_seconds * (1 - 1e-9)
    if plan.parallel.pipeline == 1 and not plan.offloads:
        assert after.step_seconds == pytest.approx(beside.step_seconds)


@pytest.mark.parametrize(("stages", "messages"), [(2, 2), (3, 4), (4, 4)])
def test_a_bulk_synchronous_stage_takes_a_micro_batch_as_long_as_all_its_messages(
    stages: int, messages: int
):
    """An end of the pipeline sends and receives one each, a middle stage two; beside each other,
    one message follows the other forward, and then backward.

    Messages take so long that computing is nothing beside them.
    """
    machine = tiny_machine(devices=4)
    link = machine.links[0].model_copy(update={"latency": SLOW})
    machine = machine.model_copy(update={"links": (link,)})
    graph = tiny_graph(layers=2 * stages - 2, tied=False)

    def each_micro(where: Machine) -> float:
        few, many = (
            predict_plan(
                tiny_plan(
                    graph, where, pipeline=stages, accumulation=micros, schedule="gpipe", clip=False
                ),
                graph,
                where,
            ).step_seconds
            for micros in (8, 16)
        )
        return (many - few) / 8

    assert each_micro(machine) == pytest.approx(2 * SLOW, rel=NEARLY)
    assert each_micro(in_turn(machine)) == pytest.approx(messages * SLOW, rel=NEARLY)


def test_transfers_of_a_bulk_synchronous_machine_delay_its_computation():
    graph, machine = tiny_graph(layers=6), tiny_machine(host="4 GiB")
    halves = ((0, 4), (4, 8))
    plan = tiny_plan(graph, machine, phases=halves, offload=STREAMED, micro=8, accumulation=4)
    beside, after = (predict_plan(plan, graph, each) for each in (machine, in_turn(machine)))
    assert beside.offload is not None
    assert after.offload is not None
    computing = after.step_seconds - after.offload.exposed_seconds
    assert after.step_seconds == pytest.approx(computing + after.offload.seconds, rel=0.02)
    assert after.step_seconds > beside.step_seconds


def test_reserved_units_let_transfers_overlap_with_slower_computation():
    graph, machine = tiny_graph(layers=6), tiny_machine(host="4 GiB")
    plan = tiny_plan(
        graph, machine, phases=((0, 4), (4, 8)), offload=STREAMED, micro=8, accumulation=4
    )
    quarter = in_turn(machine, moving_share=0.25)
    free = quarter.model_copy(update={"execution_model": "overlapping"})
    set_apart, beside = predict_plan(plan, graph, quarter), predict_plan(plan, graph, machine)
    assert set_apart.step_seconds == pytest.approx(predict_plan(plan, graph, free).step_seconds)
    assert set_apart.by_term["matmul"] == pytest.approx(beside.by_term["matmul"] / 0.75)


def test_a_bulk_synchronous_device_does_in_turn_what_an_accelerator_does_at_once():
    device = tiny_machine().device.model_copy(update={"kind": "other"})
    mode = OpContext(16, "float32", compiled=False)

    after, beside = (DeviceRates(device, mode, in_turn=turns) for turns in (True, False))

    assert float(exposed_seconds(after, 3.0, 2.0, 1.0)) == 6.0
    assert float(exposed_seconds(beside, 3.0, 1e-3, 1.0)) == pytest.approx(4.0)


def test_where_stages_are_neighbours_messages_stay_within_a_host_and_rings_leave_it():
    """Two hosts of two devices, two stages and two replicas."""
    links = (
        Link(name="bus", joins=2, latency=0.0, rate=4e9, shared_by=1),
        Link(name="cards", joins=4, latency=0.0, rate=1e9, shared_by=1),
    )
    machine = tiny_machine(devices=2).model_copy(update={"hosts": 2, "links": links})
    graph = tiny_graph(layers=2)

    def byte_seconds(*, adjacent: bool) -> tuple[float, float]:
        stack = Stack(name="any", about="any", stages_adjacent=adjacent)
        where = machine.model_copy(update={"stack": stack})
        plan = tiny_plan(graph, where, pipeline=2, data=2)
        costs = CommunicationCosts(plan, graph, where)
        sizes = plan_state_sizes(plan, graph)[1]
        # Two replicas send half of a buffer twice.
        reduced = costs.state_seconds("reduce_grads", sizes) / sizes.gradients
        return costs.message_cost.byte_seconds, reduced

    assert byte_seconds(adjacent=True) == pytest.approx((1 / 4e9, 1 / 1e9))
    assert byte_seconds(adjacent=False) == pytest.approx((1 / 1e9, 1 / 4e9))
