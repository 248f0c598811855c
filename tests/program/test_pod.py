import pytest
from hypothesis import given, settings

from program.pod_plans import MACHINE, pod_plans
from windlass.errors import PlanError
from windlass.program.legal import faults
from windlass.program.lower import lower
from windlass.program.occupancy import occupancy
from windlass.program.verify import verify
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan


@settings(max_examples=400)
@given(drawn=pod_plans())
def test_every_legal_plan_of_a_pod_lowers_to_programs_that_verify_and_fit_exactly_their_peak(
    drawn: tuple[Graph, Plan],
):
    graph, plan = drawn
    assert faults(plan, graph, MACHINE) == ()
    programs = lower(plan, graph)
    peak = max(occupancy(program, plan, graph).peak_bytes for program in programs)
    verify(programs, plan, graph, {"near": peak})
    with pytest.raises(PlanError, match="`near` overflows by 1 bytes"):
        verify(programs, plan, graph, {"near": peak - 1})
