"""What is predicted for GPUs that nobody here has: figures of published machines, measured by none.

They are predictions of Windlass's own runtime. No GPU has run it.
"""

from pathlib import Path

import pytest

from windlass import api
from windlass.hardware import load_machine
from windlass.stacks import load_stack

TORCHTITAN_TOKENS = 6667.0
"""Tokens/s of each of 8 H100 (96 GB, 500 W), Llama 3 8B, FSDP, 2 x 8,192 tokens a GPU, compiled.
Source: torchtitan's benchmark page."""
ASKED_ERROR = 0.10
"""How far from it the prediction may lie."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No outcome that was kept before answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow  # a search of 5 s: make test-slow
def test_gpt2_is_predicted_to_reach_40_percent_of_an_h100():
    planned = api.plan("gpt2-124m", machine="h100")
    assert planned.prediction.mfu >= 0.40


@pytest.mark.slow  # a search of 10 s: make test-slow
def test_llama_with_recompute_is_predicted_as_fast_as_torchtitan_publishes_it():
    planned = api.plan(
        "llama3-8b", "train.sequence=8192", "train.batch=16", "parallel.data=8",
        "parallel.pipeline=1", "parallel.tensor=1", "sharding.parameters=8", "sharding.optimizer=8",
        "recompute=full", "batch.micro=1", machine="h100-96gb-server",
    )  # fmt: skip
    prediction = planned.prediction
    tokens = prediction.tokens_per_step / prediction.step_seconds / 8
    assert tokens == pytest.approx(TORCHTITAN_TOKENS, rel=ASKED_ERROR)


@pytest.mark.parametrize("name", ["h100", "dgx-h100", "mi300x"])
def test_plans_of_our_own_leave_a_reserve_of_a_gpus_memory(name: str):
    machine = load_machine(name)
    capacity = machine.device.memory.capacity_bytes
    assert 0.90 * capacity < machine.budget_bytes < 0.95 * capacity
    titan = machine.model_copy(update={"stack": load_stack("torchtitan")})
    assert titan.budget_bytes == capacity


@pytest.mark.parametrize("name", ["gc200", "m2-ultra", "wse-3"])
def test_a_device_that_the_caching_allocator_does_not_serve_has_no_reserve(name: str):
    machine = load_machine(name)
    assert machine.budget_bytes == machine.device.memory.capacity_bytes
