"""The planner's choice for every model on every DGX family, under NCCL's rules.

Slow: `pytest -m slow tests/api/test_dgx_plans.py` plans 330 times. Most take one to five CPU
seconds; a trillion parameters nearly fit in phases on eight hosts, which takes a minute or more.
"""

import pytest

import windlass
from windlass.errors import WindlassError
from windlass.models.catalog import text_model_names
from windlass.program import lower
from windlass.program.verify.deadlock import verify_communication

FAMILIES = (
    "dgx-v100-32gb", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200",
)  # fmt: skip
HOSTS = (1, 8, 64)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", text_model_names())
def test_the_unpinned_plan_of_a_model_on_a_dgx_does_not_deadlock(model: str, family: str):
    for hosts in HOSTS:
        try:
            planned = windlass.plan(model, machine=f"{family}:{hosts}")
            plan = planned.plan
        except WindlassError:
            continue  # too large for so few hosts
        verify_communication(lower(plan, planned.graph), plan, planned.graph)
        return
    pytest.skip(f"`{model}` fits no `{family}` of {HOSTS[-1]} hosts")
