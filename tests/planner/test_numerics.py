"""What a request says about kernels and products, and what that is predicted to take."""

import pytest

from windlass import plan
from windlass.api import Planned
from windlass.errors import InputErrors

SIZES = ("train.batch=8", "train.sequence=512", "batch.micro=8", "compile=false", "loss=plain")


def planned(*overrides: str) -> Planned:
    """A plan of a small GPT on one H100."""
    return plan("gpt2-124m", *SIZES, *overrides, machine="h100")


def seconds(*overrides: str) -> float:
    prediction = planned(*overrides).prediction
    assert prediction is not None
    return prediction.step_seconds


def test_a_deterministic_plan_says_so_and_is_predicted_to_be_slower_on_a_gpu():
    deterministic = planned("deterministic=true", "precision=bfloat16")
    assert deterministic.plan.deterministic is True
    assert planned("precision=bfloat16").plan.deterministic is None
    assert seconds("deterministic=true", "precision=bfloat16") > seconds("precision=bfloat16")


def test_tf32_is_as_large_as_float32_and_takes_less_and_bfloat16_less_still():
    times = [seconds(f"precision={each}") for each in ("float32", "tf32", "bfloat16")]
    assert times == sorted(times, reverse=True)
    sizes = [
        max(peak.peak_bytes for peak in planned(f"precision={each}").prediction.peaks)
        for each in ("float32", "tf32")
    ]
    assert sizes[0] == sizes[1]


def test_only_a_request_asks_for_tf32_and_only_where_the_machine_has_it():
    assert planned().plan.precision == "bfloat16"
    with pytest.raises(InputErrors, match=r"`precision` = tf32, but `v100` states no rate for it"):
        plan("gpt2-124m", *SIZES, "precision=tf32", machine="v100")
