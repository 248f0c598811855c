"""Seconds of products with weights of which only some blocks are kept."""

import pytest

from factories import tiny_machine
from windlass.cost.device_rates import DeviceRates, OpContext
from windlass.cost.op_time import LayerPass, pass_seconds
from windlass.hardware import load_machine
from windlass.schema.graph import KeptBlocks, LayerCost, MatmulShape, Op, Polynomial, Precision
from windlass.schema.machine import Device, Machine
from windlass.schema.machine.rates import Curve, Point, SparseProductRate

TOKENS, OUTPUTS, INPUTS = 512, 1024, 256
DENSITY = 0.125


def product(density: float | None, *, block: int = 64) -> Op:
    """The forward product of a layer for one token of each sequence, or its dense twin."""
    sides = [Polynomial(constant=1), Polynomial(bs=1)]
    sides += [Polynomial(constant=size) for size in (OUTPUTS, INPUTS)]
    none = Polynomial()
    return Op(
        name="mm" if density is None else "block_linear",
        kind="matmul",
        flop=Polynomial(bs=2 * OUTPUTS * INPUTS * (density or 1.0)),
        read_bytes=none,
        written_bytes=none,
        live_bytes=none,
        shape=MatmulShape(*sides),
        kept=None if density is None else KeptBlocks(block, density),
    )


def weight_gradient(density: float) -> Op:
    """The gradient of the kept blocks."""
    op = product(density)
    sides = [Polynomial(constant=size) for size in (1, OUTPUTS, INPUTS)]
    return op.model_copy(update={"shape": MatmulShape(*sides, Polynomial(bs=1))})


def seconds(
    op: Op, device: Device, precision: Precision = "float32", *, backward: bool = False
) -> float:
    none = Polynomial()
    cost = LayerCost(
        precision=precision, compiled=False, forward=(op,), backward=(), saved_bytes=none,
        input_bytes=none, output_bytes=none,
    )  # fmt: skip
    rates = DeviceRates(device, OpContext(TOKENS, precision, compiled=False))
    return pass_seconds(LayerPass((op,), cost, backward=backward), rates, 1).matmul


def with_rates(machine: Machine, **changes: object) -> Device:
    device = machine.device
    rates = tuple(rate.model_copy(update=changes) for rate in device.matmul)
    return device.model_copy(update={"matmul": rates})


def test_a_product_nobody_measured_takes_the_kept_share_of_the_dense_one_over_its_efficiency():
    efficiency = Curve(points=(Point(32, 0.5), Point(128, 1.0)))
    device = with_rates(tiny_machine(), sparse_efficiency=efficiency)
    dense = seconds(product(None), device)

    for block, share in ((32, 0.5), (64, 0.5**0.5), (128, 1.0), (16, 0.5)):
        expected = dense * DENSITY / share
        assert seconds(product(DENSITY, block=block), device) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["a100-80gb", "v100", "wse-2", "sn10-rdu", "gc200"])
@pytest.mark.parametrize("halves", [False, True])
def test_with_ideal_sparsity_a_product_takes_exactly_the_kept_share_of_the_dense_one(
    name: str, halves: bool
):
    device = load_machine(name).device
    precision: Precision = device.half_precision if halves else "float32"
    ideal = device.with_ideal_sparsity()
    dense = seconds(product(None), device, precision)

    assert seconds(product(None), ideal, precision) == dense
    assert seconds(product(DENSITY), ideal, precision) == pytest.approx(dense * DENSITY)
    assert seconds(product(DENSITY), device, precision) >= dense * DENSITY * (1 - 1e-12)


def test_a_measured_product_takes_the_terms_of_its_role_and_of_the_nearest_block():
    rates = tuple(
        SparseProductRate(
            block=block, role=role, call_seconds=call, flop_rate=1e11, read=1e10, write=2e10
        )
        for block, call in ((32, 1.0), (64, 2.0))
        for role in ("forward", "input_gradient", "weight_gradient")
    )
    device = with_rates(tiny_machine(), sparse_products=rates)
    kept = OUTPUTS * INPUTS * DENSITY
    work = 2 * TOKENS * kept / 1e11

    forward = work + 4 * kept / 1e10 + 4 * TOKENS * OUTPUTS / 2e10
    assert seconds(product(DENSITY), device) == pytest.approx(2 + forward)
    assert seconds(product(DENSITY, block=16), device) == pytest.approx(1 + forward)
    gradient = work + 4 * TOKENS * (OUTPUTS + INPUTS) / 1e10 + 4 * kept / 2e10
    found = seconds(weight_gradient(DENSITY), device, backward=True)
    assert found == pytest.approx(2 + gradient)


def test_a_device_that_is_shared_is_slower_in_sparse_products_too():
    rate = SparseProductRate(block=64, role="forward", call_seconds=0.0, flop_rate=1e11)
    device = with_rates(tiny_machine(), sparse_products=(rate,))
    alone = seconds(product(DENSITY), device)

    assert seconds(product(DENSITY), device.split(3, cores=3)) == pytest.approx(3 * alone)
