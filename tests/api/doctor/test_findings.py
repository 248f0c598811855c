"""What counts as the same result."""

import pytest
import torch

from windlass.doctor.findings import WrongResultError, compare
from windlass.doctor.run_checks import published_device

REFERENCE = torch.tensor([1.0, -4.0, 0.0], dtype=torch.float64)


def test_the_error_is_relative_to_the_largest_value_of_the_reference():
    result = REFERENCE + torch.tensor([0.0, 0.0, 0.004])
    assert compare({"the output": (result, REFERENCE)}, 2e-3) == "error 1.0e-03, at most 2.0e-03"


@pytest.mark.parametrize("wrong", [0.1, float("nan"), float("inf")])
def test_a_result_that_differs_or_is_no_number_is_wrong(wrong: float):
    result = REFERENCE.clone()
    result[2] = wrong
    with pytest.raises(WrongResultError, match="the output differs by"):
        compare({"right": (REFERENCE, REFERENCE), "the output": (result, REFERENCE)}, 1e-3)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", None),
    ],
)
def test_an_accelerator_is_compared_with_the_published_device_of_its_model(
    model: str, name: str | None
):
    device = published_device(model)
    assert (None if device is None else device.name) == name
