"""Models that run by the code of transformers, trained beside a plain loop over the same model."""

from pathlib import Path

import pytest

from tiny_transformers import ARCHITECTURES
from transformers_proof import IN_FLOAT64, prove
from windlass.errors import WindlassError

pytestmark = pytest.mark.slow
TOLERANCE, TOLERANCE_OF_FLOAT64 = 1e-5, 1e-9
OF_LOGITS = 1e-3
"""What float32's rounding in 20 steps leaves of logits."""
OF_FILES = 1e-6
"""Folders have weights in float32."""
WITHOUT_PLAN = (
    "falcon", "falcon_h1", "gpt_oss", "mamba2", "opt", "bloom", "stablelm", "roberta",
    "xlm-roberta", "electra", "deberta-v2", "distilbert", "dinov2", "ijepa",
)  # fmt: skip
"""Those of which transformers shards no block, and those of images."""


def tolerance(model_type: str) -> float:
    return TOLERANCE_OF_FLOAT64 if model_type in IN_FLOAT64 else TOLERANCE


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_twenty_steps_a_phase_and_an_export_are_those_of_a_plain_loop(home: Path, model_type: str):
    apart = prove(model_type, "memory", home)

    assert apart["losses"] <= tolerance(model_type)
    assert apart["logits"] <= OF_LOGITS
    assert apart["phases"] == 0


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_two_stages_learn_as_a_plain_loop_does(home: Path, model_type: str):
    assert prove(model_type, "stages", home)["losses"] <= tolerance(model_type)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_two_tensor_ranks_reach_the_weights_of_a_plain_loop(home: Path, model_type: str):
    if model_type in WITHOUT_PLAN:
        with pytest.raises(WindlassError, match=r"no `base_model_tp_plan` for its|takes images"):
            prove(model_type, "tensor", home)
        return

    apart = prove(model_type, "tensor", home)

    assert apart["losses"] <= TOLERANCE_OF_FLOAT64
    assert apart["weights"] <= OF_FILES
    assert apart["logits"] <= OF_FILES
