"""AdamW, its schedule and the norm."""

import pytest
import torch
from hypothesis import given, strategies as st

from windlass.errors import InputErrors
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import MasterParameter
from windlass.runtime.verify.plain_loop.training import plain_learning_rate
from windlass.schema.request import Request
from windlass.schema.train_request import TrainSettings
from windlass.torch_ext import StoredMoment, device_for

NORM = 1e-6
"""Relative tolerance: some thousand squares are summed in float32, and some thousand such sums."""
CPU = device_for("cpu")
PIECE = CPU.piece_elements
SHAPES = ("cosine", "linear", "wsd", "constant", "inverse_sqrt")
SIZES = {"steps": 5, "batch": 4, "sequence": 16}


def weight(*shape: int, precision: torch.dtype = torch.float32, seed: int = 0) -> MasterParameter:
    draws = torch.Generator().manual_seed(seed)
    master = torch.randn(shape, generator=draws)
    return MasterParameter(
        name="w",
        shape=master.shape,
        decays=master.dim() >= 2,
        master=master,
        working=master if precision == torch.float32 else master.to(precision),
        moments=(StoredMoment(torch.zeros(shape)), StoredMoment(torch.zeros(shape))),
        steps=torch.zeros(()),
        gradient=torch.randn(shape, generator=draws).to(precision),
    )


def reference(
    one: MasterParameter, settings: TrainSettings, steps: int, scale: float = 1.0
) -> torch.Tensor:
    """The weight after some steps of torch's own optimizer with one gradient."""
    parameter = one.master.clone().requires_grad_()
    decay = settings.weight_decay if parameter.dim() >= 2 else 0.0
    optimizer = torch.optim.AdamW(
        [parameter], betas=settings.betas, eps=settings.epsilon, weight_decay=decay
    )
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        parameter.grad = one.gradient.float() * scale
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, PIECE // 2 + 5)])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_an_update_is_that_of_torch(
    precision: torch.dtype, shape: tuple[int, ...], divisor: float | None
):
    settings = TrainSettings(**SIZES, learning_rate=0.1)
    one, optimizer = weight(*shape, precision=precision), Optimizer(settings, CPU)
    gradient = one.gradient.clone()
    expected = reference(one, settings, 3, 1 / (divisor or 1))
    for step in (1, 2, 3):
        one.gradient = gradient.clone()
        optimizer.update([one], step, None if divisor is None else torch.tensor(divisor))
    torch.testing.assert_close(one.master, expected, rtol=1e-5, atol=1e-6)
    assert one.gradient is None
    assert float(one.steps) == 3
    assert torch.equal(one.working, one.master.to(precision))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_norm_is_over_all_gradients_in_float32(precision: torch.dtype):
    parts = [
        weight(3, PIECE // 2 + 5, precision=precision),
        weight(11, precision=precision),
    ]
    whole = torch.cat([one.gradient.double().flatten() for one in parts])
    norm = Optimizer(TrainSettings(**SIZES), CPU).gradient_norm(parts)
    assert float(norm) == pytest.approx(float(whole.norm()), rel=NORM)


def test_a_norm_within_the_clip_divides_nothing():
    optimizer = Optimizer(TrainSettings(**SIZES, clip=2.0), CPU)
    assert optimizer.numbers.clip_divisor(1.9) is None
    assert float(optimizer.numbers.clip_divisor(4.0)) == pytest.approx(2.0)
    assert Optimizer(TrainSettings(**SIZES, clip=None), CPU).numbers.clip_divisor(1e9) is None


@pytest.mark.parametrize("schedule", SHAPES)
@given(steps=st.integers(1, 300), warmup=st.floats(0, 0.5), decay=st.floats(0.01, 0.5))
def test_every_schedule_is_the_one_of_the_plain_loop(
    schedule: str, steps: int, warmup: float, decay: float
):
    shape = {"schedule": schedule} | ({"decay": decay} if schedule == "wsd" else {})
    settings = TrainSettings(**SIZES | {"steps": steps}, warmup=warmup, **shape)
    for step in range(1, steps + 1):
        expected = plain_learning_rate(settings, step)
        assert learning_rate(settings, step) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_wsd_is_constant_until_torchs_linear_schedule_begins():
    settings = TrainSettings(
        **SIZES | {"steps": 20}, warmup=0.2, decay=0.25, final_rate=0.0, schedule="wsd"
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    expected = []
    for _ in range(5):
        optimizer.step()
        falling.step()
        expected += falling.get_last_lr()
    rates = [learning_rate(settings, step) for step in range(1, 21)]
    assert rates[4:15] == [settings.learning_rate] * 11
    assert rates[15:] == pytest.approx(expected, abs=1e-15)


def test_four_times_as_many_steps_halve_the_inverse_root():
    settings = TrainSettings(**SIZES | {"steps": 400}, warmup=0.05, schedule="inverse_sqrt")
    rates = [learning_rate(settings, step) for step in (20, 80, 320)]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (("schedule=constant", "final_rate=0.2"), "falls to no final rate"),
        (("decay=0.5",), "only `wsd` has steps of decay"),
        (("schedule=wsd", "warmup=0.6", "decay=0.5"), "lower `decay` to 0.4"),
    ],
)
def test_settings_that_a_schedule_does_not_have_are_refused(pins: tuple[str, ...], message: str):
    with pytest.raises(InputErrors, match=message):
        Request.resolve(overrides=[f"train.{pin}" for pin in pins])


@given(
    st.integers(1, 10_000),
    st.floats(0, 0.99),
    st.floats(0, 1),
)
def test_the_rate_rises_then_falls_to_its_final_share(steps: int, warmup: float, final: float):
    settings = TrainSettings(
        **SIZES | {"steps": steps}, warmup=warmup, final_rate=final, learning_rate=0.5
    )
    seen = sorted({1, *range(1, steps, max(1, steps // 50)), steps})
    rates = [learning_rate(settings, step) for step in seen]
    rising = round(warmup * steps)
    up = [rate for step, rate in zip(seen, rates, strict=True) if step <= rising]
    down = [rate for step, rate in zip(seen, rates, strict=True) if step > rising]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert all(0 <= rate <= 0.5 for rate in rates)
    if rising < steps:
        assert rates[-1] == pytest.approx(0.5 * final, abs=1e-12)


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_of_micro_batches_are_accumulated_in_float32(accumulated: bool):
    one = weight(3, PIECE, precision=torch.bfloat16)
    one.gradient = None
    parts = [weight(3, PIECE, precision=torch.bfloat16, seed=seed).gradient for seed in range(3)]
    expected = sum(part.float() for part in parts)
    for part in parts:
        one.add_gradient(part.clone(), accumulated=accumulated)
    assert one.gradient.dtype == (torch.float32 if accumulated else torch.bfloat16)
    if accumulated:
        assert torch.equal(one.gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_gradient_adds_to_the_rows_it_has(dtype: torch.dtype):
    one = weight(6, 3, precision=dtype)
    start = one.gradient.clone()
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1, 4, 1]]), torch.ones(3, 3, dtype=dtype), (6, 3), check_invariants=True
    )
    one.add_gradient(rows, accumulated=False)
    assert torch.equal(one.gradient, start + rows.to_dense())
    one.gradient = None
    one.add_gradient(rows, accumulated=True)
    one.flush_sparse_gradient()
    assert torch.equal(one.gradient, rows.to_dense().float())
