import pytest
from hypothesis import given, strategies as st

from factories import tiny_machine
from windlass.cost.device_rates import DeviceRates, OpContext
from windlass.cost.op_time import LayerPass, TermSeconds, pass_seconds
from windlass.hardware import load_machine
from windlass.schema.graph import LayerCost, MatmulShape, Op, Polynomial
from windlass.schema.machine import Device
from windlass.schema.machine.rates import AttentionRate, Curve, OpRate, Point, ProductRate
from windlass.schema.machine.stack import OWN_STACK, AttentionKernel
from windlass.stacks import load_stack


def _rates(*, compiled: bool = False, **changes: object) -> DeviceRates:
    machine = tiny_machine()
    device = machine.device.model_copy(update=changes)
    return DeviceRates(device, OpContext(1, "float32", compiled))


def _memory(
    name: str = "act", *, nbytes: float = 0.0, written: float = 0.0, calls: int = 1
) -> Op:  # fmt: skip
    return Op(
        name=name, kind="memory", read_bytes=Polynomial(nbytes - written),
        written_bytes=Polynomial(written), calls=calls,
        live_bytes=Polynomial(written),
    )  # fmt: skip


def _seconds(op: Op, rates: DeviceRates) -> TermSeconds:
    return pass_seconds(LayerPass((op,), _layer(op), backward=False), rates, micro=1)


def _layer(*forward: Op) -> LayerCost:
    return LayerCost(
        precision="float32", compiled=False, forward=forward, backward=(),
        saved_bytes=Polynomial(), input_bytes=Polynomial(), output_bytes=Polynomial(),
    )  # fmt: skip


@given(st.floats(1, 1e10), st.floats(1, 1e10))
def test_more_bytes_are_never_faster(nbytes: float, more: float):
    rates = _rates()
    fewer = _seconds(_memory(nbytes=nbytes), rates).total
    assert _seconds(_memory(nbytes=nbytes + more), rates).total >= fewer * (1 - 1e-12)


@given(st.floats(1, 1e13), st.floats(1, 1e13))
def test_more_flop_are_never_faster(flop: float, more: float):
    rates = _rates()
    one = Polynomial(1)

    def product(flop: float) -> Op:
        return Op(
            name="mm", kind="matmul", flop=Polynomial(flop), read_bytes=one, written_bytes=one,
            live_bytes=one, shape=MatmulShape(one, one, one, one),
        )  # fmt: skip

    fewer = _seconds(product(flop), rates).matmul
    assert _seconds(product(flop + more), rates).matmul >= fewer * (1 - 1e-12)


def test_a_plain_op_takes_its_bytes_over_the_rate_and_its_launches():
    seconds = _seconds(_memory(nbytes=1e9, calls=3), _rates())
    assert seconds.traffic == pytest.approx(1e9 / 2e10)
    assert seconds.launch == pytest.approx(3 * 5e-6)


def test_an_op_that_was_measured_by_name_takes_its_own_rate():
    slow = OpRate(name="gelu", precision="float32", curve=Curve(points=(Point(1, 1e9),)))
    other = OpRate(name="gelu", precision="bfloat16", curve=Curve(points=(Point(1, 1e6),)))
    seconds = _seconds(_memory("gelu", nbytes=1e9), _rates(op_rates=(slow, other)))
    assert seconds.traffic == pytest.approx(1.0)


def test_a_compiled_run_is_as_slow_as_its_slowest_part_and_prefers_compiled_rates():
    eager = OpRate(name="gelu", precision="float32", curve=Curve(points=(Point(1, 1e9),)))
    norm = eager.model_copy(update={"name": "norm", "curve": Curve(points=(Point(1, 4e9),))})
    fused = eager.model_copy(update={"compiled": True, "curve": Curve(points=(Point(1, 2e9),))})
    rates = _rates(op_rates=(eager, norm, fused), compiled=True)
    assert _seconds(_memory("add+gelu+norm", nbytes=1e9), rates).traffic == pytest.approx(0.5)


def test_a_product_with_a_bias_takes_its_own_rate_where_one_was_measured():
    one = Polynomial(1)
    op = Op(
        name="addmm", kind="matmul", flop=Polynomial(1e9), read_bytes=one, written_bytes=one,
        live_bytes=one, shape=MatmulShape(one, one, one, one),
    )  # fmt: skip
    rates = _rates()
    plain = _seconds(op, rates).matmul
    slower = rates.device.matmul[0].model_copy(update={"biased": Curve(points=(Point(1, 1e9),))})
    assert plain == pytest.approx(_seconds(op.model_copy(update={"name": "mm"}), rates).matmul)
    assert _seconds(op, _rates(matmul=(slower,))).matmul == pytest.approx(1.0)


def test_an_accelerator_launches_while_it_works():
    op = _memory(nbytes=2e9)
    assert _seconds(op, _rates(kind="cuda")).launch == 0
    small = _seconds(_memory(nbytes=1), _rates(kind="cuda"))
    assert small.total == pytest.approx(5e-6)


def test_attention_takes_the_rate_of_the_nearest_head_width_and_its_direction():
    def rate(width: int, forward: float, backward: float) -> AttentionRate:
        return AttentionRate(
            head_width=width,
            forward=Curve(points=(Point(1, forward),)),
            backward=Curve(points=(Point(1, backward),)),
        )

    machine = tiny_machine()
    matmul = tuple(
        each.model_copy(update={"attention_rates": (rate(32, 1e9, 2e9), rate(128, 3e9, 4e9))})
        for each in machine.device.matmul
    )
    rates = _rates(matmul=matmul)
    cases = ((32, False, 1e9), (128, True, 4e9))
    for width, backward, rate_ in cases:
        op = _attention(b=1, h=1, s=1, k=width)
        passed = pass_seconds(LayerPass((op,), _layer(op), backward), rates, micro=1)
        assert passed.attention == pytest.approx(4 * width / rate_)


@pytest.mark.parametrize(
    ("kernel", "rate"), [("flash1", 1e9), ("flash2", 2e9), ("flash3", 2e9), ("unfused", None)]
)
def test_attention_runs_in_the_newest_kernel_that_the_stack_and_the_device_have(
    kernel: AttentionKernel, rate: float | None
):
    known = tuple(
        _same_both_ways(64, speed).model_copy(update={"kernel": name})
        for name, speed in (("flash1", 1e9), ("flash2", 2e9))
    )
    matmul = tuple(
        each.model_copy(update={"attention_rates": known}) for each in tiny_machine().device.matmul
    )
    device = tiny_machine().device.model_copy(update={"matmul": matmul})
    stack = OWN_STACK.model_copy(update={"attention": kernel})
    op = _attention(b=1, h=1, s=8, k=64)
    rates = DeviceRates(device, OpContext(8, "float32", False), stack)
    passed = pass_seconds(LayerPass((op,), _layer(op), False), rates, micro=1)
    flop = 4 * 8 * 8 * 64
    plain = device.rate("float32").attention.at(flop)
    assert passed.attention == pytest.approx(flop / (rate or plain))


def test_attention_stays_in_16_bits_where_products_take_8():
    h100 = load_machine("h100").device
    op = _attention(b=1, h=8, s=4096, k=128)
    run = LayerPass((op,), _layer(op), False)
    seconds = [
        pass_seconds(run, DeviceRates(h100, OpContext(4096, precision, False)), micro=1).attention
        for precision in ("bfloat16", "float8")
    ]
    assert seconds[0] == seconds[1] > 0


@pytest.mark.parametrize(("kind", "rate"), [("cuda", 0.621), ("cpu", 1.0)])
def test_deterministic_attention_is_slower_in_the_backward_pass_of_an_accelerator(
    kind: str, rate: float
):
    device = load_machine("h100").device.model_copy(update={"kind": kind})
    op = _attention(b=1, h=8, s=4096, k=128)
    forward, backward = (
        [
            pass_seconds(LayerPass((op,), _layer(op), is_backward), rates, micro=1).attention
            for rates in (
                DeviceRates(device, OpContext(4096, "bfloat16", False, 1, deterministic))
                for deterministic in (False, True)
            )
        ]
        for is_backward in (False, True)
    )
    assert forward[0] == forward[1]
    assert backward[0] / backward[1] == pytest.approx(rate)


def test_attention_without_a_mask_computes_the_tiles_that_a_mask_leaves_out():
    h100, s = load_machine("h100").device, 4096
    rates = DeviceRates(h100, OpContext(s, "bfloat16", False))

    def seconds(is_causal: bool | None) -> float:
        op = _attention(b=1, h=8, s=s, k=128).model_copy(update={"is_causal": is_causal})
        return pass_seconds(LayerPass((op,), _layer(op), False), rates, micro=1).attention

    assert seconds(None) == seconds(True)
    assert seconds(False) / seconds(True) == pytest.approx(2 * s / (s + 128))


def test_the_width_of_heads_follows_from_what_attention_writes():
    # given 2 sequences of 8 tokens, 3 heads of width 32 in float32
    b, s, h, k = 2, 8, 3, 32
    attention = _attention(b=b, h=h, s=s, k=k)
    machine = tiny_machine()
    known = tuple(_same_both_ways(width, rate) for width, rate in ((32, 7e9), (64, 1e9)))
    matmul = tuple(
        each.model_copy(update={"attention_rates": known}) for each in machine.device.matmul
    )
    device = machine.device.model_copy(update={"matmul": matmul})
    rates = DeviceRates(device, OpContext(s, "float32", False))
    passed = pass_seconds(LayerPass((attention,), _layer(attention), False), rates, micro=1)
    assert passed.attention == pytest.approx(4 * b * h * s * s * k / 7e9)


@pytest.mark.parametrize(("kind", "expected"), [("cpu", 2e9), ("other", 1e9)])
def test_a_cpu_attends_at_a_rate_between_those_of_the_nearest_head_widths(
    kind: str, expected: float
):
    known = tuple(_same_both_ways(width, rate) for width, rate in ((32, 1e9), (128, 4e9)))
    device = tiny_machine().device
    matmul = tuple(each.model_copy(update={"attention_rates": known}) for each in device.matmul)
    device = device.model_copy(update={"matmul": matmul, "kind": kind})
    # 64 is as far from 32 as from 128 on a logarithmic scale; 63 is nearer to 32
    width = 64 if kind == "cpu" else 63
    op = _attention(b=1, h=1, s=1, k=width)
    rates = DeviceRates(device, OpContext(1, "float32", False))
    passed = pass_seconds(LayerPass((op,), _layer(op), False), rates, micro=1)
    assert passed.attention == pytest.approx(4 * width / expected)


def _attention(*, b: int, h: int, s: int, k: int) -> Op:
    """Fused attention of h heads of width k over b sequences of s tokens, in float32."""
    return Op(
        name="sdpa", kind="attention", flop=Polynomial(4 * b * h * s * s * k),
        read_bytes=Polynomial(3 * 4 * b * s * h * k),
        written_bytes=Polynomial(4 * b * s * h * k + 4 * b * s * h), live_bytes=Polynomial(1),
    )  # fmt: skip


def _same_both_ways(width: int, rate: float) -> AttentionRate:
    curve = Curve(points=(Point(1, rate),))
    return AttentionRate(head_width=width, forward=curve, backward=curve)


def test_a_product_with_measured_sides_takes_its_call_its_flop_and_its_bytes():
    product = _product(8, 16, 32)
    rate = tiny_machine().device.rate("float32")
    forward = ProductRate(
        role="forward", call_seconds=1e-5, flop_rate=1e9, read=1e6, write=2e6
    )  # fmt: skip
    rates = _rates(matmul=(rate.model_copy(update={"products": (forward,)}),))

    seconds = _seconds(product, rates).matmul

    read, written = 4 * 16 * 32 / 1e6, 4 * 8 * 16 / 2e6
    assert seconds == pytest.approx(1e-5 + 2 * 8 * 16 * 32 / 1e9 + read + written)


def test_a_product_whose_rate_depends_on_its_weights_takes_its_flop_at_the_rate_of_their_size():
    curve = Curve(points=(Point(6 * 8, 4e9), Point(6 * 32, 1e9)))
    forward = ProductRate(role="forward", call_seconds=0.0, flop_rate=4e9, by_weights=curve)
    rate = tiny_machine().device.rate("float32")
    device = tiny_machine().device.model_copy(
        update={"matmul": (rate.model_copy(update={"products": (forward,)}),)}
    )

    def seconds(of: Device) -> list[float]:
        rates = _rates(matmul=of.matmul)
        return [_seconds(_product(5, 6, k), rates).matmul for k in (8, 16, 32, 64)]

    flop = [2 * 5 * 6 * k for k in (8, 16, 32, 64)]
    per_second = [4e9, 2e9, 1e9, 1e9]
    times = [flop / rate for flop, rate in zip(flop, per_second, strict=True)]
    assert seconds(device) == pytest.approx(times)
    assert seconds(device.slowed_down(2)) == pytest.approx([2 * each for each in times])


@pytest.mark.parametrize(("stack", "vocabulary"), [(None, 50_304), ("megatron-core", 50_257)])
def test_our_own_runtime_multiplies_a_padded_vocabulary_on_an_accelerator(
    stack: str | None, vocabulary: int
):
    h100 = load_machine("h100").device
    rates = DeviceRates(
        h100, OpContext(1024, "bfloat16", False, vocabulary=50_257),
        load_stack(stack) if stack else None,
    )  # fmt: skip
    seconds = [
        _seconds(_product(4096, entries, 768), rates).matmul for entries in (50_257, vocabulary)
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert (seconds[0] > _seconds(_product(4096, 50_304, 768), rates).matmul) == (stack is not None)


def _product(m: int, n: int, k: int) -> Op:
    return Op(
        name="mm", kind="matmul", flop=Polynomial(2 * m * n * k), read_bytes=Polynomial(1),
        written_bytes=Polynomial(1), live_bytes=Polynomial(1),
        shape=MatmulShape(Polynomial(1), Polynomial(m), Polynomial(n), Polynomial(k)),
    )  # fmt: skip
