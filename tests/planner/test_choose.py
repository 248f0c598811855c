import pytest
from hypothesis import given, settings, strategies as st

from factories import sharded_graph, tiny_graph, tiny_machine
from planner.single_stage import single_stage_plans
from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.predict import predict_plan
from windlass.errors import InputErrors
from windlass.planner.choose import NothingFits, choose_plan, seek_plan
from windlass.planner.result import run_seconds, with_budget
from windlass.planner.search.evaluate import evaluate, infeasible_plan
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.request import ResolvedRequest

GRAPH = tiny_graph(layers=3, width=64, vocabulary=128)
MACHINE = tiny_machine(runtime=1000, compiler=20_000)


def request(*overrides: str, batch: int = 8) -> ResolvedRequest:
    return ResolvedRequest.resolve(
        overrides=(f"train.batch={batch}", "train.sequence=32", "train.steps=10", *overrides)
    )


def peak(plan: Plan, graph: Graph, machine: Machine) -> int:
    program, *_ = lower(plan, graph)
    process_bytes = machine.device.process_bytes(compiled=plan.compile)
    return memory_profile(program, plan, graph, runtime_bytes=process_bytes).peak_bytes


graphs = st.builds(
    tiny_graph,
    layers=st.integers(0, 4),
    width=st.sampled_from([8, 32, 96]),
    vocabulary=st.sampled_from([16, 200, 5000]),
    tied=st.booleans(),
    sparse=st.booleans(),
)
cases = st.tuples(
    graphs | graphs.map(sharded_graph),
    st.sampled_from([1, 6, 8, 12]),
    st.lists(
        st.sampled_from(["recompute=full", "precision=float32", "compile=false"]), unique=True
    ),
)


def counted(plan: Plan, graph: Graph) -> list[Plan]:
    """The plan, and those in which less is recomputed."""
    if plan.recompute == "none":
        return [plan]
    most = graph.layers - 2
    plans = [with_recompute(plan, [count]) for count in range(1, most + 1)]
    if not plan.compile and plan.parallel.tensor == 1:
        plans += [with_recompute(plan, [0], [count]) for count in range(1, most + 1)]
        plans += [with_recompute(plan, [count], [most]) for count in range(1, most)]
    return plans


@settings(max_examples=6)
@given(case=cases, share=st.floats(0.9, 2))
def test_the_choice_is_the_fastest_of_all_plans_that_fit(
    case: tuple[Graph, int, list[str]], share: float
):
    graph, batch, pins = case
    asked = request(*pins, batch=batch)
    everything = single_stage_plans(asked, graph, MACHINE)
    if asked.recompute is None:
        everything = [each for plan in everything for each in counted(plan, graph)]
    smallest = min(peak(plan, graph, MACHINE) for plan in everything)
    budget = max(1, int(share * smallest))
    asked = request(*pins, f"memory={budget}", batch=batch)
    fitting = [plan for plan in everything if peak(plan, graph, MACHINE) <= budget]
    choice = choose_plan(asked, graph, MACHINE)
    assert choice.fits == bool(fitting)
    if choice.plan is not None:
        times = [run_seconds(predict_plan(plan, graph, MACHINE), 10) for plan in fitting]
        assert choice.run_seconds == pytest.approx(min(times), rel=1e-9)
        assert choice.plan in fitting


@settings(max_examples=10)
@given(case=cases, less=st.integers(10_000, 5_000_000), more=st.integers(0, 5_000_000))
def test_more_memory_is_never_slower(case: tuple[Graph, int, list[str]], less: int, more: int):
    graph, batch, pins = case
    small, large = (
        seek_plan(request(*pins, f"memory={budget}", batch=batch), graph, MACHINE)
        for budget in (less, less + more)
    )
    if not isinstance(small, NothingFits):
        assert not isinstance(large, NothingFits)
        assert large.run_seconds <= small.run_seconds * (1 + 1e-12)


@settings(max_examples=12)
@given(case=cases, data=st.data())
def test_a_short_program_gives_the_prediction_of_the_full_one(
    case: tuple[Graph, int, list[str]], data: st.DataObject
):
    graph, batch, pins = case
    plan = data.draw(
        st.sampled_from(single_stage_plans(request(*pins, batch=batch), graph, MACHINE))
    )
    full = with_budget(predict_plan(plan, graph, MACHINE), 1000)
    short = evaluate(plan, ArrayClock(plan, graph, MACHINE), budget_bytes=1000)
    assert short.peaks == full.peaks
    assert short.plan == full.plan
    assert short.tokens_per_step == full.tokens_per_step
    for name in ("step_seconds", "low_seconds", "high_seconds", "model_flop", "compile_seconds"):
        assert getattr(short, name) == pytest.approx(getattr(full, name), rel=1e-9)
    assert short.by_term == pytest.approx(full.by_term)
    assert short.by_kind == pytest.approx(full.by_kind)


@settings(max_examples=12)
@given(case=cases, data=st.data())
def test_a_short_program_gives_the_peak_of_the_full_one(
    case: tuple[Graph, int, list[str]], data: st.DataObject
):
    graph, batch, pins = case
    plan = data.draw(
        st.sampled_from(single_stage_plans(request(*pins, batch=batch), graph, MACHINE))
    )
    program, *_ = lower(plan, graph)
    process_bytes = MACHINE.device.process_bytes(compiled=plan.compile)
    full = memory_profile(program, plan, graph, runtime_bytes=process_bytes)
    memory = infeasible_plan(plan, graph, MACHINE, 1000)
    assert memory.peak_bytes - 1000 == memory.over_bytes
    assert memory.peak_bytes == full.peak_bytes
    assert memory.by_class == full.by_class
    assert memory.instruction == program.instructions[full.peak_instruction]


def test_the_chosen_plan_verifies_at_its_own_peak_memory():
    choice = choose_plan(request(), GRAPH, MACHINE)
    assert choice.plan is not None
    assert choice.prediction is not None
    assert choice.prediction.fits
    room = choice.prediction.peaks[0].peak_bytes
    verify_programs(lower(choice.plan, GRAPH), choice.plan, GRAPH, {"device": room})


def test_a_capacity_raised_by_exactly_the_missing_bytes_fits():
    smallest = min(
        peak(plan, GRAPH, MACHINE) for plan in single_stage_plans(request(), GRAPH, MACHINE)
    )
    budget = smallest - 12_345
    choice = choose_plan(request(f"memory={budget}"), GRAPH, MACHINE)
    assert choice.plan is None
    assert choice.advice is not None
    assert choice.advice.over_bytes == choice.infeasible[0].over_bytes == 12_345
    assert choose_plan(request(f"memory={budget + 12_345}"), GRAPH, MACHINE).fits
    assert not choose_plan(request(f"memory={budget + 12_344}"), GRAPH, MACHINE).fits


def test_each_infeasible_plan_names_its_fullest_moment_and_bytes():
    budget = 600_000
    for refusal in choose_plan(request(f"memory={budget}"), GRAPH, MACHINE).infeasible:
        (program,) = lower(refusal.plan, GRAPH)
        assert refusal.instruction in program.instructions
        assert refusal.peak_bytes - budget == refusal.over_bytes > 0
        assert refusal.peak_bytes == sum(refusal.by_class.values())
        assert refusal.peak_bytes == peak(refusal.plan, GRAPH, MACHINE)


def test_the_budget_takes_the_place_of_the_machines_capacity():
    choice = choose_plan(request("memory=100MiB"), GRAPH, MACHINE)
    assert choice.prediction is not None
    assert choice.prediction.peaks[0].capacity_bytes == 100 * 2**20
    assert choice.prediction.machine == MACHINE.label


def test_runners_up_are_the_fastest_of_each_family_in_order_and_say_in_which_term():
    choice = choose_plan(request(), GRAPH, MACHINE)
    keys = ("precision", "compile", "recompute", "batch.micro")
    for key in keys:
        assert any(key in runner.differs for runner in choice.runners_up)
    assert len(choice.runners_up) <= len(keys)
    slower = [runner.slower_seconds for runner in choice.runners_up]
    assert slower == sorted(slower)
    assert slower[0] >= 0
    for runner in choice.runners_up:
        assert runner.term_seconds > 0 or runner.slower_seconds == 0


def test_recompute_is_a_runner_up_where_all_activations_fit():
    pins = ("batch.micro=8", "precision=float32", "compile=false")
    choice = choose_plan(request(*pins), GRAPH, MACHINE)
    (runner,) = choice.runners_up
    assert runner.differs == {"recompute": "full"}
    assert runner.slower_seconds > 0


def test_advice_drops_pins_that_do_not_fit():
    pins = ("batch.micro=8", "recompute=none", "precision=float32", "compile=false")
    asked = request(*pins)
    (plan,) = single_stage_plans(asked, GRAPH, MACHINE)
    near = peak(plan, GRAPH, MACHINE) - 1
    choice = choose_plan(request(*pins, f"memory={near}"), GRAPH, MACHINE)
    assert choice.advice is not None
    assert choice.advice.changes
    costs = [change.cost for change in choice.advice.changes]
    assert costs == sorted(costs)
    for change in choice.advice.changes:
        tree = [pin for pin in pins if pin.split("=")[0] not in str(change.overrides)]
        budget = [] if "memory" in str(change.overrides) else [f"memory={near}"]
        mended = choose_plan(request(*tree, *budget, *change.overrides), GRAPH, MACHINE)
        assert mended.fits, change.overrides


def test_state_larger_than_the_device_is_given_in_devices():
    choice = choose_plan(
        request("memory=100kB"), GRAPH, tiny_machine(memory="200kB", runtime="50kB")
    )
    assert choice.advice is not None
    assert choice.advice.changes == ()
    state = GRAPH.parameter_count * 16
    assert choice.advice.state_bytes == state
    assert choice.advice.devices == -(-state // 50_000)


@pytest.mark.parametrize("devices", [1, 4])
def test_impossible_requests_are_refused_on_one_device_and_on_several(devices: int):
    machine = tiny_machine(devices=devices, precisions=("float32",))
    asked = request("train.sequence=128", "precision=bfloat16")
    with pytest.raises(InputErrors) as refused:
        choose_plan(asked, tiny_graph(max_sequence=64), machine)
    assert "takes at most 64 tokens" in str(refused.value)
    assert "states no rate for it" in str(refused.value)
