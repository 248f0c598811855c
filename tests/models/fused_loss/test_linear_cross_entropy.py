"""The fused loss, against the plain one and what autograd makes of it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from windlass.models.fused_loss.linear_cross_entropy import linear_cross_entropy
from windlass.models.fused_loss.sizes import FusedLossSizes
from windlass.models.loss import IGNORE_INDEX, mean_cross_entropy
from windlass.torch_ext import allocator_stats, install_allocator

VOCABULARY, WIDTH = 70_000, 8
"""A vocabulary of which 128 tokens are taken at a time, so that 300 tokens are three chunks."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-6}
"""Largest error relative to the largest element, against the plain loss in float64. The plain loss
itself is off by 5.5e-5 in float32 and by 0.5 * 2^-6 in bfloat16."""


def operands(
    dtype: torch.dtype, *, tokens: int = 300, vocabulary: int = VOCABULARY, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Inputs `[2, tokens / 2, d]`, weight, bias and targets of a loss."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, tokens // 2, WIDTH, generator=generator)
    weight = torch.randn(vocabulary, WIDTH, generator=generator)
    shift = torch.randn(vocabulary, generator=generator) if bias else None
    targets = torch.randint(0, vocabulary, x.shape[:2], generator=generator)
    kept = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, shift)]
    return kept[0], kept[1], kept[2], targets  # type: ignore[return-value]


def plain_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return mean_cross_entropy(functional.linear(x, weight, bias), targets)


def mean_of_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, z_loss: float
) -> Tensor:
    return mean_cross_entropy(functional.linear(x, weight, bias), targets, z_loss)


def results(loss, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> list[Tensor]:  # noqa: ANN001
    """The loss and the gradients of a third of it, in float64."""
    wanted = [x, weight] if bias is None else [x, weight, bias]
    value = loss(x, weight, bias, targets)
    return [each.double() for each in (value, *torch.autograd.grad(value / 3, wanted))]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loss", [mean_of_logits, linear_cross_entropy])
def test_a_z_loss_adds_its_gradient_and_leaves_the_loss_as_it_is(
    loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    *factors, targets = operands(dtype, tokens=30, vocabulary=700, bias=True)
    targets[0, :5] = IGNORE_INDEX
    exact = [None if t is None else t.detach().double().requires_grad_() for t in factors]
    plain = results(plain_loss, *exact, targets)

    def written_out(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        rows = functional.linear(x, weight, bias)[targets != IGNORE_INDEX]
        squares = rows.exp().sum(dim=1).log().square()
        return mean_cross_entropy(rows, targets[targets != IGNORE_INDEX]) + 0.1 * squares.mean()

    found = results(partial(loss, z_loss=0.1), *factors, targets)

    _, *gradients = results(written_out, *exact, targets)
    assert_close(found, [plain[0], *gradients], TOLERANCE[dtype])
    assert (gradients[0] - plain[1]).abs().max() > 0.1 * plain[1].abs().max()


@pytest.mark.parametrize("loss", [mean_of_logits, linear_cross_entropy])
def test_a_weighted_mean_is_that_of_targets_which_occur_so_often(loss: Callable[..., Tensor]):
    x, weight, bias, targets = operands(torch.float64, tokens=30, vocabulary=700, bias=True)
    targets[0, :5] = IGNORE_INDEX
    times = torch.randint(0, 4, targets.shape, generator=torch.Generator().manual_seed(2))
    bits = times.float().view(torch.int32).long()

    def written_out(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        repeated = x.flatten(0, 1).repeat_interleave(times.flatten(), dim=0)
        each = targets.flatten().repeat_interleave(times.flatten())
        return mean_of_logits(repeated, weight, bias, each, z_loss=0.1)

    weighted = torch.stack((targets, bits), dim=1)
    found = results(partial(loss, z_loss=0.1), x, weight, bias, weighted)
    expected = results(written_out, x, weight, bias, targets)
    assert_close(found, expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_has_the_loss_and_the_gradients_of_the_plain_one(dtype: torch.dtype, bias: bool):
    given = operands(dtype, bias=bias)

    found = results(linear_cross_entropy, *given)

    *factors, targets = given
    exact = [None if t is None else t.detach().double().requires_grad_() for t in factors]
    assert_close(found, results(plain_loss, *exact, targets), TOLERANCE[dtype])


@pytest.mark.parametrize("ignored", [slice(0, 1), slice(120, 151), slice(1, None)])
def test_ignored_targets_count_neither_in_the_mean_nor_in_any_gradient(ignored: slice):
    x, weight, bias, targets = operands(torch.float64, bias=True)
    targets.view(-1)[ignored] = IGNORE_INDEX

    found = results(linear_cross_entropy, x, weight, bias, targets)

    assert_close(found, results(plain_loss, x, weight, bias, targets), TOLERANCE[torch.float64])
    assert not found[1].view(-1, WIDTH)[ignored].any()


def test_without_any_target_the_loss_is_no_number_and_gradients_are_zero():
    x, weight, bias, targets = operands(torch.float32, tokens=4, vocabulary=20, bias=True)

    loss, *gradients = results(linear_cross_entropy, x, weight, bias, targets.fill_(IGNORE_INDEX))

    assert loss.isnan()
    assert loss.isnan() == plain_loss(x, weight, bias, targets).isnan()
    assert not any(gradient.any() for gradient in gradients)


def test_a_loss_beyond_the_smallest_probability_of_float32_is_exact():
    weight = torch.tensor([[300.0], [0.0]]).requires_grad_()
    loss = linear_cross_entropy(torch.ones(1, 1, 1), weight, None, torch.ones(1, 1).long())
    assert loss.item() == 300


def test_evaluation_computes_no_gradients():
    given = operands(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(*given)
    assert not loss.requires_grad
    assert torch.equal(loss, linear_cross_entropy(*given).detach())


def test_both_backward_passes_of_a_zero_bubble_schedule_get_the_same_gradients():
    x, weight, bias, targets = operands(torch.float64, tokens=6, vocabulary=50)
    loss = linear_cross_entropy(x, weight, bias, targets)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [x, weight])))


def test_the_logits_never_exist_whole():
    if not install_allocator():
        pytest.skip("torch's own allocator keeps no count")
    tokens, vocabulary = 4096, 16_384
    given = operands(torch.float32, tokens=tokens, vocabulary=vocabulary)

    def peak(loss) -> int:  # noqa: ANN001
        before = allocator_stats().allocated
        allocator_stats()
        results(loss, *given)
        return allocator_stats().peak_allocated - before

    logits_bytes = 4 * tokens * vocabulary
    assert peak(linear_cross_entropy) < 0.4 * logits_bytes
    assert peak(plain_loss) > 1.6 * logits_bytes


def test_a_chunk_is_a_power_of_two_of_tokens_whose_logits_take_64_mib_at_most():
    for vocabulary in (2, 256, 50_257, 128_256, 2**24, 2**27):
        rows = FusedLossSizes(vocabulary, 64, 4).rows
        assert rows.bit_count() == 1
        assert rows == 1 or 4 * rows * vocabulary <= 64 * 2**20
        assert rows == 1024 or 8 * rows * vocabulary > 64 * 2**20 or rows == 1
