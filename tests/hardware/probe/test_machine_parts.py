"""What is measured later stands beside what was measured first, at one speed of the machine."""

import pytest

from factories import tiny_machine
from windlass.hardware.probe.attention import CompiledSpeed
from windlass.hardware.probe.compile_costs import CompileCosts
from windlass.hardware.probe.machine_parts import _with_compiled
from windlass.schema import AttentionRate, Curve, OpRate, Point


def test_compiled_code_measured_in_a_slow_moment_counts_at_the_speed_of_the_other_rates():
    device = tiny_machine(precisions=("float32",)).device
    plain = AttentionRate(
        head_width=64,
        attention="math",
        forward=Curve(points=(Point(512, 3e9),)),
        backward=Curve(points=(Point(512, 2e9),)),
    )
    (rate,) = device.matmul
    rates = (rate.model_copy(update={"attention_rates": (plain,)}),)
    gelu = OpRate(
        name="gelu", precision="float32", compiled=True, curve=Curve(points=(Point(1e6, 4e9),))
    )
    costs = CompileCosts(
        runtime_bytes=1,
        compiler_bytes=7,
        compile_seconds=10.0,
        compiled_pass_seconds=2e-5,
        op_rates=(gelu,),
        attention={"float32": CompiledSpeed(forward=2.0, backward=3.0)},
    )

    found = _with_compiled(device.model_copy(update={"matmul": rates}), costs, slower=2.0)

    assert (found.compile_seconds, found.compiled_pass_seconds) == (5.0, 1e-5)
    assert found.compiler_bytes == 7
    assert found.op_rates[-1].curve.at(1e6) == pytest.approx(8e9)
    first, compiled = found.matmul[0].attention_rates  # a ratio of two times in turn stays
    assert first == plain
    assert compiled.compiled
    assert (compiled.forward.at(512), compiled.backward.at(512)) == (
        pytest.approx(6e9), pytest.approx(6e9),
    )  # fmt: skip
