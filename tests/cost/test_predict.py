from typing import Any

import pytest
from hypothesis import given, strategies as st

from factories import (
    HOST_OFFLOAD,
    catalog_graph,
    sharded_graph,
    tiny_graph,
    tiny_machine,
    tiny_plan,
)
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.machine.rates import Curve, MomentRate, Point
from windlass.schema.plan import Offload
from windlass.schema.prediction import Prediction

_sizes = st.integers(min_value=1, max_value=6)


def _predict(
    graph: Graph | None = None,
    machine: Machine | None = None,
    **wishes: Any,  # noqa: ANN401  whatever a plan takes
) -> Prediction:
    graph, machine = graph or tiny_graph(), machine or tiny_machine()
    return predict_plan(tiny_plan(graph, machine, **wishes), graph, machine)


@given(micro=_sizes, accumulation=_sizes, compiled=st.booleans())
def test_kinds_and_terms_both_sum_to_the_step(micro: int, accumulation: int, compiled: bool):
    prediction = _predict(micro=micro, accumulation=accumulation, compiled=compiled)
    assert sum(prediction.by_kind.values()) == pytest.approx(prediction.step_seconds)
    assert sum(prediction.by_term.values()) == pytest.approx(prediction.step_seconds)
    assert prediction.low_seconds < prediction.step_seconds < prediction.high_seconds


_IN_PHASES = {"offload": HOST_OFFLOAD, "phases": ((0, 2), (2, 4), (4, 6)), "accumulation": 2}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("execution", ["overlapping", "bulk-synchronous"])
@pytest.mark.parametrize(
    "wishes",
    [
        {"accumulation": 2}, _IN_PHASES,
        {"offload": Offload(optimizer="host"), "accumulation": 3},
        {"data": 4, "accumulation": 2}, {"pipeline": 2, "data": 2, "accumulation": 4},
        {"tensor": 2, "data": 2, "sharding": (2, 2)} | _IN_PHASES,
    ],
    ids=["one device", "phases", "optimizer offloaded", "replicas", "pipeline", "sharded phases"],
)  # fmt: skip
def test_both_breakdowns_sum_to_the_step_and_agree_on_the_update(
    kind: str, execution: str, wishes: dict[str, Any]
):
    graph, plain = (
        sharded_graph(tiny_graph(layers=4, width=64)),
        tiny_machine(devices=4, host=2**30),
    )
    machine = plain.model_copy(
        update={
            "execution_model": execution,
            # Launches of an update are a term of their own.
            "device": plain.device.model_copy(update={"kind": kind, "launch_seconds": 0.0}),
        }
    )
    prediction = _predict(graph, machine, **wishes)
    by_term, by_kind = prediction.by_term, prediction.by_kind
    assert sum(by_term.values()) == pytest.approx(prediction.step_seconds)
    assert sum(by_kind.values()) == pytest.approx(prediction.step_seconds)
    assert by_term.get("update", 0.0) == pytest.approx(by_kind.get("update", 0.0))
    has_peers = bool({"data", "pipeline", "tensor"} & set(wishes))
    assert ("communication and waiting" in by_term) == has_peers
    assert min((*by_term.values(), *by_kind.values())) >= 0


@given(micro=_sizes, more=_sizes)
def test_a_larger_micro_batch_is_never_faster(micro: int, more: int):
    assert _predict(micro=micro + more).step_seconds >= _predict(micro=micro).step_seconds


@given(accumulation=_sizes, more=_sizes)
def test_more_micro_batches_are_never_faster(accumulation: int, more: int):
    fewer = _predict(accumulation=accumulation).step_seconds
    assert _predict(accumulation=accumulation + more).step_seconds > fewer


@given(layers=_sizes, more=_sizes)
def test_more_layers_are_never_faster_nor_smaller(layers: int, more: int):
    small, large = _predict(tiny_graph(layers=layers)), _predict(tiny_graph(layers=layers + more))
    assert large.step_seconds > small.step_seconds
    assert large.peaks[0].peak_bytes >= small.peaks[0].peak_bytes


@given(factor=st.floats(min_value=1.1, max_value=100))
def test_a_machine_with_faster_products_is_never_slower(factor: float):
    graph, slow = tiny_graph(), tiny_machine()
    rates = tuple(
        rate.model_copy(
            update={
                "curve": Curve(
                    points=tuple(Point(p.size, p.rate * factor) for p in rate.curve.points)
                )
            }
        )
        for rate in slow.device.matmul
    )
    fast = slow.model_copy(update={"device": slow.device.model_copy(update={"matmul": rates})})
    assert _predict(graph, fast).step_seconds < _predict(graph, slow).step_seconds


def test_recompute_adds_the_forward_passes_of_the_layers_between_the_ends():
    plain, again = _predict(), _predict(recompute="full")
    ends = _predict(tiny_graph(layers=0))
    blocks = plain.by_kind["forward"] - ends.by_kind["forward"]
    assert again.by_kind["recompute"] == pytest.approx(blocks)
    assert again.step_seconds - plain.step_seconds == pytest.approx(blocks)


def test_the_step_of_one_device_ends_with_its_timeline():
    graph, machine = tiny_graph(), tiny_machine()
    plan = tiny_plan(graph, machine, accumulation=3)
    programs = lower(plan, graph)
    (lane,) = simulate(plan, graph, machine, programs).devices
    prediction = predict_plan(plan, graph, machine, programs)
    assert max(lane.ends) == pytest.approx(prediction.step_seconds)
    assert list(lane.starts) == sorted(lane.starts)
    assert all(end >= start for start, end in zip(lane.starts, lane.ends, strict=True))


def test_the_peak_is_the_fullest_instruction_of_the_timeline():
    graph, machine = tiny_graph(), tiny_machine(runtime=1000)
    plan = tiny_plan(graph, machine, accumulation=2)
    programs = lower(plan, graph)
    (lane,) = simulate(plan, graph, machine, programs).devices
    (peak, *_) = predict_plan(plan, graph, machine, programs).peaks
    assert peak.peak_bytes == max(lane.memory_bytes)
    assert sum(peak.by_class.values()) == peak.peak_bytes
    full = memory_profile(programs[0], plan, graph, runtime_bytes=1000)
    assert peak.peak_bytes == full.peak_bytes


def test_a_plan_that_compiles_pays_for_the_compiler_in_time_and_memory():
    machine = tiny_machine(compiler=5000)
    device = machine.device.model_copy(update={"compile_seconds": 2.0})
    machine = machine.model_copy(update={"device": device})
    eager, compiled = _predict(machine=machine), _predict(machine=machine, compiled=True)
    assert eager.compile_seconds == 0
    assert compiled.compile_seconds == pytest.approx(6.0)
    assert compiled.peaks[0].by_class["runtime"] - eager.peaks[0].by_class["runtime"] == 5000


def test_capacity_decides_what_fits_and_by_how_much_it_does_not():
    roomy = _predict(machine=tiny_machine(memory="1 GiB"))
    tight = _predict(machine=tiny_machine(memory=roomy.peaks[0].peak_bytes - 1))
    assert roomy.fits
    assert not tight.fits
    assert tight.peaks[0].over_bytes == 1


def test_a_noisier_machine_gets_a_wider_interval():
    machine = tiny_machine()
    calm, wild = (machine.model_copy(update={"noise": noise}) for noise in (0.01, 0.5))
    assert _predict(machine=wild).high_seconds > _predict(machine=calm).high_seconds


def test_model_flop_counts_every_micro_batch_and_no_recompute():
    graph = tiny_graph()
    plain = _predict(graph, micro=2, accumulation=3)
    again = _predict(graph, micro=2, accumulation=3, recompute="full")
    assert plain.model_flop == pytest.approx(3 * graph.micro_batch_flop(2, 16))
    assert again.model_flop == plain.model_flop


def test_moments_in_fewer_bits_cost_time_whether_measured_or_not():
    machine = tiny_machine()
    rates = (MomentRate(moments="int8", elements=1e4),)
    device = machine.device.model_copy(update={"moment_rates": rates})
    measured = machine.model_copy(update={"device": device})
    plain = _predict(machine=measured).by_kind["update"]
    prediction = _predict(machine=measured, moments="int8").by_kind["update"]
    assert prediction - plain == pytest.approx(tiny_graph().parameter_count / 1e4, rel=0.01)
    guessed = [_predict(moments=each).by_kind["update"] for each in ("bfloat16", "int8")]
    assert _predict().by_kind["update"] < guessed[0] < guessed[1]


def test_clipped_gradients_of_float32_are_written_back_and_others_are_not():
    machine = tiny_machine()
    for precision, written in (("float32", 4), ("bfloat16", 0)):
        clipped, free = (
            _predict(precision=precision, clip=clip).by_kind["update"] for clip in (True, False)
        )
        due = written * tiny_graph().parameter_count / machine.device.update_rate
        assert clipped - free == pytest.approx(due, rel=1e-6, abs=1e-15)


def test_a_weight_takes_at_least_one_part_of_the_codec():
    machine = tiny_machine()
    rates = (MomentRate(moments="int8", elements=1e4, part_seconds=0.5),)
    device = machine.device.model_copy(update={"moment_rates": rates})
    measured = machine.model_copy(update={"device": device})
    plain = _predict(machine=measured).by_kind["update"]
    prediction = _predict(machine=measured, moments="int8").by_kind["update"]
    elements, weights = tiny_graph().parameter_count, 3
    each = 1 / 1e4 - 0.5 / 2**17
    assert prediction - plain == pytest.approx(elements * each + weights * 0.5, rel=0.01)


def test_the_gradient_norm_costs_only_where_something_is_clipped():
    assert "grad_norm" in _predict(clip=True).by_kind
    assert "grad_norm" not in _predict(clip=False).by_kind


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_wait_for_each_other_and_the_step_ends_with_the_last(stages: int):
    graph, machine = tiny_graph(layers=4, tied=False), tiny_machine(devices=stages)
    plan = tiny_plan(graph, machine, pipeline=stages, accumulation=4)
    alone = _predict(graph, accumulation=4)
    prediction = predict_plan(plan, graph, machine)
    lanes = simulate(plan, graph, machine, lower(plan, graph)).devices
    assert prediction.step_seconds == pytest.approx(max(max(lane.ends) for lane in lanes))
    assert prediction.step_seconds > alone.step_seconds / stages
    assert sum(prediction.by_kind.values()) == pytest.approx(prediction.step_seconds)


@pytest.mark.parametrize("wishes", [{}, {"offload": HOST_OFFLOAD, "phases": ((0, 2), (2, 4))}])
def test_documents_that_share_rows_attend_as_rows_of_their_length_do(wishes: dict[str, Any]):
    dials = {"layers": 2, "width": 32, "heads": 4, "sequence": 64, "vocabulary": 64}
    graph, machine = catalog_graph("gpt-tiny", **dials), tiny_machine(host=2**30)
    packed = graph.model_copy(update={"document_tokens": 16.0})

    rows = _predict(packed, machine, sequence=64, micro=1, **wishes).by_term
    short = _predict(graph, machine, sequence=16, micro=4, **wishes).by_term
    whole = _predict(graph, machine, sequence=64, micro=1, **wishes).by_term
    assert rows["attention"] == pytest.approx(short["attention"])
    assert rows["matmul"] == pytest.approx(whole["matmul"])

    # Compiled code computes whole rows under a mask.
    one, other = (
        _predict(each, machine, sequence=64, micro=1, compiled=True) for each in (packed, graph)
    )
    assert one.by_term["attention"] == other.by_term["attention"]
