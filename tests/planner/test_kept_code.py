"""Code that an earlier run has compiled costs a share of compiling it, and is chosen sooner."""

import pytest

from factories import tiny_graph, tiny_machine
from windlass.cost.compiled_code import KEPT_SHARE, CompiledCode, KeptCode
from windlass.planner.choose import choose_plan
from windlass.planner.given_plan import result_of_given_plan
from windlass.planner.result import PlanningResult
from windlass.schema.machine import Machine
from windlass.schema.request import ResolvedRequest
from windlass.schema.train_request import TrainSettings

GRAPH = tiny_graph()
STEPS = 10
PINS = {"precision": "float32", "recompute": "none", "phases": 1}


def machine(compile_seconds: float) -> Machine:
    found = tiny_machine()
    # An eager pass costs the host 10 ms, a compiled one nothing.
    costs = {"compile_seconds": compile_seconds, "pass_seconds": 0.01}
    device = found.device.model_copy(update=costs)
    return found.model_copy(update={"device": device})


def choose(on: Machine, kept: KeptCode = frozenset(), **pins: object) -> PlanningResult:
    train = TrainSettings(steps=STEPS, batch=4, sequence=16)
    request = ResolvedRequest.model_validate({"train": train, **PINS, **pins})
    return choose_plan(request, GRAPH, on, kept_code=kept)


def gain() -> float:
    """Seconds by which compiled code makes the run shorter, compiling apart."""
    eager, compiled = (choose(machine(0.0), compile=each) for each in (False, True))
    return eager.run_seconds - compiled.run_seconds


def test_a_run_too_short_to_earn_compilation_uses_code_that_is_there_already():
    kinds = len({span.kind for span in GRAPH.layer_runs})
    on = machine(0.5 * (1 + 1 / KEPT_SHARE) * gain() / kinds)  # between both costs
    assert not choose(on).plan.compile
    compiled = choose(on, compile=True)
    code = CompiledCode.of(compiled.plan)

    chosen = choose(on, frozenset([code]))

    assert chosen.plan == compiled.plan
    seconds = chosen.prediction.compile_seconds
    assert seconds == pytest.approx(KEPT_SHARE * compiled.prediction.compile_seconds)
    assert chosen.run_seconds == pytest.approx(STEPS * chosen.prediction.step_seconds + seconds)
    given = result_of_given_plan(
        chosen.plan, ResolvedRequest(train=TrainSettings(steps=STEPS, batch=4, sequence=16)),
        GRAPH, on, kept_code=frozenset([code]),
    )  # fmt: skip
    assert given.prediction.compile_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "other",
    [{"micro": 3}, {"sequence": 8}, {"precision": "bfloat16"}, {"attention": "math"}],
    ids=str,
)
def test_code_for_other_sizes_or_numbers_saves_nothing(other: dict[str, object]):
    on = machine(1.0)
    plan = choose(on, compile=True).plan
    kept = frozenset([CompiledCode.of(plan)._replace(**other)])
    full = choose(on, compile=True).prediction.compile_seconds
    assert choose(on, kept, compile=True).prediction.compile_seconds == full


def test_compiled_code_that_was_not_measured_is_taken_only_where_it_is_asked_for():
    measured = machine(0.0)
    on = measured.model_copy(update={"unmeasured": ("compiled code",)})
    assert choose(measured).plan.compile
    assert not choose(on).plan.compile
    assert choose(on, compile=True).plan.compile
