"""A request that no plan meets names its smallest plan, and the single change that helps."""

import pytest

from windlass import plan
from windlass.errors import InputErrors, PlanError

EIGHT = "dgx-a100-40gb"
LLAMA = ("llama2-13b", "train.sequence=2048", "train.batch=8")


def refusal(*request: str) -> str:
    with pytest.raises((PlanError, InputErrors)) as caught:
        assert plan(*request, machine=EIGHT).plan
    return str(caught.value)


def test_a_plan_that_gathers_parameters_for_each_pass_fits_where_whole_weights_would_not():
    pinned = plan(*LLAMA, "stack=fsdp", "sharding.parameters=8", "recompute=full", machine=EIGHT)
    assert pinned.plan.sharding.reshard
    assert pinned.prediction.fits
    assert plan(*LLAMA, "stack=fsdp", machine=EIGHT).prediction.fits


def test_pins_that_exclude_each_other_are_refused_with_the_value_that_makes_a_plan():
    said = refusal(*LLAMA, "stack=fsdp", "parallel.data=4", "sharding.parameters=8")
    assert "`parallel.data=8` makes one that fits, with a predicted peak of 37.1 GiB" in said
    assert "`sharding.parameters=4` makes one that needs" in said


@pytest.mark.parametrize(
    "pins",
    [
        ("parallel.schedule=gpipe", "phases=1"),
        ("parallel.schedule=interleaved", "stack=nemo"),
        ("parallel.virtual_stages=2", "stack=nemo"),
    ],
)
def test_a_pinned_schedule_whose_state_is_too_large_is_refused_for_its_memory(
    pins: tuple[str, ...],
):
    said = refusal("gpt3-175b", "train.batch=64", "parallel.pipeline=8", *pins)
    assert "GiB are needed at least (by PP=8 TP=1 DP=1" in said


def test_a_pin_that_alone_keeps_a_model_from_fitting_is_named_with_the_value_that_fits():
    said = refusal(*LLAMA, "stack=megatron-core", "parallel.data=8")
    assert "are needed at least (by PP=1 TP=1 DP=8 ZeRO-1=8" in said
    assert "- `parallel.data=1` makes it fit with a predicted peak of" in said
