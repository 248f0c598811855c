"""What fitted constants say of devices stands in the machines' files."""

import pytest

from validation.laws.device_rates import attention_rates, product_rates
from windlass.hardware import catalog
from windlass.schema.graph import Precision
from windlass.validation.stack_constants import calibration

WRITTEN = 5e-4
"""Machines' files hold four digits."""
BF16: Precision = "bfloat16"


@pytest.mark.parametrize(
    ("machine", "products", "attention", "device"),
    [
        ("a100-80gb", "vtrain", "mosaic-a100-80gb", "a100-80gb"),
        ("a100-40gb", "mosaic-a100-40gb", "mosaic-a100-40gb", "a100-40gb"),
    ],
)
def test_a_machines_fitted_rates_are_those_of_the_stacks_that_its_sources_name(
    machine: str, products: str, attention: str, device: str
):
    found = catalog.load_machine(machine)
    rate = found.device.rate(BF16)

    for curve, points, stack in (
        (rate.curve, product_rates(products, device), products),
        (rate.attention, attention_rates(attention, device), attention),
    ):
        assert [at.size for at in curve.points] == [size for size, _ in points]
        assert [at.rate for at in curve.points] == pytest.approx(
            [speed for _, speed in points], rel=WRITTEN
        )
        place = "curve" if curve is rate.curve else "attention"
        assert stack in found.source_of(f"device.matmul.bfloat16.{place}").source


@pytest.mark.parametrize(("family", "stack"), [("dgx-a100-80gb", "vtrain")])
def test_how_long_hosts_wait_for_the_slowest_is_what_the_stack_says_that_their_source_names(
    family: str, stack: str
):
    found = catalog.load_machine(f"{family}:2")
    fitted = calibration(stack).values["gpu.stragglers"]
    assert found.stragglers == pytest.approx(fitted, rel=WRITTEN)
    assert stack in found.source_of("stragglers").source


@pytest.mark.parametrize(
    ("stack", "device"), [("vtrain", "a100-80gb"), ("mosaic-h100-80gb", "h100-80gb")]
)
def test_larger_products_come_nearer_to_the_peak_and_never_reach_it(stack: str, device: str):
    rates = [speed for _, speed in product_rates(stack, device)]

    assert rates == sorted(rates)
    assert rates[-1] < (312e12 if device == "a100-80gb" else 989.5e12)
