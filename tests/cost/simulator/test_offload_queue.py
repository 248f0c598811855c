import pytest
from hypothesis import given, strategies as st

from factories import HOST_OFFLOAD, sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate_programs
from windlass.cost.simulator.offload_queue import first_step_cost
from windlass.program.lowering.lower import lower
from windlass.schema.machine import Machine
from windlass.schema.prediction import Prediction

PHASES = ((0, 2), (2, 4), (4, 6))


def machine(rate: float) -> Machine:
    """A machine whose host tier reads and writes this many bytes/s."""
    plain = tiny_machine(host="1 GiB")
    near, host = plain.device.tiers
    tiers = (near, host.model_copy(update={"read": rate, "write": rate}))
    return plain.model_copy(update={"device": plain.device.model_copy(update={"tiers": tiers})})


def predicted(rate: float, *, accumulation: int = 1, streamed: bool = True) -> Prediction:
    graph, on = tiny_graph(layers=4), machine(rate)
    away = {"offload": HOST_OFFLOAD, "phases": PHASES} if streamed else {}
    plan = tiny_plan(graph, on, accumulation=accumulation, **away)
    return predict_plan(plan, graph, on)


def test_transfers_that_take_no_time_do_not_delay_computation():
    far = predicted(1e18).offload
    assert far is not None
    assert far.exposed_seconds < 1e-9
    assert predicted(1e18).offload_efficiency > 1 - 1e-6


def test_communication_does_not_count_as_waiting_for_offload():
    on = machine(1e18)
    link = tiny_machine(devices=4).links[0].model_copy(update={"rate": 1e6})
    on = on.model_copy(update={"devices_per_host": 4, "links": (link,)})
    graph = sharded_graph(tiny_graph(layers=4), (2,))
    plan = tiny_plan(
        graph,
        on,
        tensor=2,
        data=2,
        sharding=(2, 2),
        accumulation=2,
        offload=HOST_OFFLOAD,
        phases=PHASES,
    )
    prediction = predict_plan(plan, graph, on)
    assert prediction.by_term["communication and waiting"] > prediction.step_seconds / 2
    assert prediction.offload_efficiency > 1 - 1e-6


@given(st.floats(1e5, 1e12), st.floats(1.0, 100.0))
def test_a_slower_tier_never_makes_a_step_shorter(rate: float, times: float):
    assert predicted(rate).step_seconds <= predicted(rate / times).step_seconds * (1 + 1e-9)


def test_a_step_limited_by_transfers_takes_about_as_long_as_they_do():
    slow = predicted(1e5)
    assert slow.offload is not None
    assert 0.7 < slow.step_seconds / slow.offload.seconds < 1.3


def test_computation_grows_with_micro_batches_and_offload_traffic_does_not():
    once, often = (predicted(1e9, accumulation=count) for count in (2, 8))
    assert once.offload is not None
    assert often.offload is not None
    assert (once.offload.read_bytes, once.offload.written_bytes) == (
        often.offload.read_bytes,
        often.offload.written_bytes,
    )
    assert often.offload_efficiency > once.offload_efficiency


def test_nothing_is_transferred_without_offloading():
    whole = predicted(1e9, streamed=False)
    assert whole.offload is None
    assert whole.offload_efficiency == 1


def test_the_peak_of_an_offload_tier_is_what_is_offloaded_to_it():
    near, host = predicted(1e9).peaks
    assert near.peak_bytes < predicted(1e9, streamed=False).peaks[0].peak_bytes + 60 * 2**20
    assert host.peak_bytes > 0
    assert sum(host.by_class.values()) == host.peak_bytes


@given(st.floats(1e5, 1e12))
def test_a_first_step_reads_no_less_and_takes_no_less_than_a_steady_one(rate: float):
    graph, on = tiny_graph(layers=4), machine(rate)
    plan = tiny_plan(graph, on, accumulation=2, offload=HOST_OFFLOAD, phases=PHASES)
    first, steady = (
        first_step_cost(plan, graph, on, lower(plan, graph)[0]),
        predict_plan(plan, graph, on),
    )
    assert steady.offload is not None
    assert first.written_bytes == steady.offload.written_bytes
    assert first.read_bytes > steady.offload.read_bytes
    assert first.seconds >= steady.step_seconds * (1 - 1e-9)


def test_a_first_step_in_memory_is_like_any_other():
    graph, on = tiny_graph(layers=4), machine(1e9)
    plan = tiny_plan(graph, on, accumulation=2)
    first = first_step_cost(plan, graph, on, lower(plan, graph)[0])
    assert first.seconds == pytest.approx(predict_plan(plan, graph, on).step_seconds)
    assert (first.read_bytes, first.written_bytes) == (0, 0)


def test_a_recomputed_layer_waits_for_its_offloaded_input():
    graph, on = tiny_graph(layers=4), machine(1e6)
    home = HOST_OFFLOAD.model_copy(update={"activations": "host"})
    plan = tiny_plan(graph, on, accumulation=2, offload=home, phases=PHASES)
    (program,) = lower(plan, graph)
    spans = simulate_programs(plan, graph, on, InstructionCosts(plan, graph, on), (program,))[0]
    back: dict[tuple[int, int | None], float] = {}
    checked = 0
    for (kind, layer, micro), span in zip(program.instructions, spans, strict=True):
        if kind == "reload_activation":
            back[layer, micro] = span.end
        elif kind == "recompute" and (layer - 1, micro) in back:
            assert span.start >= back[layer - 1, micro]
            checked += 1
    assert checked > 0
