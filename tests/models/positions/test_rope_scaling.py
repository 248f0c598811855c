"""Rotary angles that cannot be computed are refused before anything is built."""

from dataclasses import replace

import pytest

from windlass.models.catalog import model_config
from windlass.models.positions.rope_scaling import RopeScaling


@pytest.mark.parametrize("base", [1.0, 0.0, -10.0])
def test_a_base_by_which_no_angle_falls_is_refused(base: float) -> None:
    for name in ("rotary_base", "window_rotary_base"):
        changes = {name: base}
        (error,) = replace(model_config("llama3-8b"), **changes).errors()  # type: ignore[arg-type]
        assert error == f"`{name}` is {base:g}, must be above 1"


@pytest.mark.parametrize(("fast", "slow"), [(32.0, 0.0), (1.0, 1.0), (1.0, 32.0)])
def test_rotations_between_which_no_speed_lies_are_refused(fast: float, slow: float) -> None:
    scaling = RopeScaling(
        type="yarn", factor=4.0, original_sequence=4096, beta_fast=fast, beta_slow=slow
    )
    (error,) = replace(model_config("llama3-8b"), rope_scaling=scaling).errors()
    assert "`rope_scaling.beta_fast` is" in error
