"""Every optimizer against torch's own or that of another library."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from windlass.runtime.optimizer_state.optimizer_state import StateFormat
from windlass.runtime.optimizers.learning_rate import learning_rate
from windlass.runtime.optimizers.optimizer import Optimizer, SingleRank
from windlass.runtime.parameters import MasterParameter, new_master_parameter
from windlass.runtime.verify.plain_loop.optimizers import plain_optimizer
from windlass.schema import TrainSettings, optimizer_law
from windlass.torch_ext import device_for

CPU = device_for("cpu")
STEPS = 50
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""Fifty updates in float32, whose operations are in another order."""
SHAPES = ((7,), (5, 3), (16, 24))
MORE_SHAPES = {"adafactor": (*SHAPES, (3, 2, 4, 5))}
"""Muon's oracle takes matrices alone."""
OracleFactory = Callable[[list[Tensor], TrainSettings, float], torch.optim.Optimizer]


def settings_of(name: str, **changes: object) -> TrainSettings:
    chosen = {"learning_rate": 0.02} | changes
    return TrainSettings(steps=STEPS, batch=4, sequence=16, optimizer=name, **chosen)


def new_weights(settings: TrainSettings) -> list[MasterParameter]:
    draws = torch.Generator().manual_seed(0)
    state = StateFormat(optimizer_law(settings.optimizer))
    masters = [
        torch.randn(shape, generator=draws) for shape in MORE_SHAPES.get(settings.optimizer, SHAPES)
    ]
    return [
        new_master_parameter(
            f"layer.{index}",
            master,
            master,
            state,
            decays=master.dim() >= 2,
            matrix=master.dim() == 2,
            factors=state.new_factors(tuple(master.shape), master),
        )
        for index, master in enumerate(masters)
    ]


def gradients(settings: TrainSettings) -> Iterator[list[Tensor]]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shapes = MORE_SHAPES.get(settings.optimizer, SHAPES)
        yield [torch.randn(shape, generator=draws) for shape in shapes]


def oracle_weights(factory: OracleFactory, settings: TrainSettings, divisor: float) -> list[Tensor]:
    """The weights after 50 steps of an oracle, with and without decay in two optimizers."""
    weights = [w.master.clone().requires_grad_() for w in new_weights(settings)]
    parts = [
        factory([w for w in weights if (w.dim() >= 2) == decays], settings, decay)
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    for step, current in enumerate(gradients(settings), start=1):
        for weight, gradient in zip(weights, current, strict=True):
            weight.grad = gradient / divisor
        for part in parts:
            for group in part.param_groups:
                group["lr"] = learning_rate(settings, step)
            part.step()
    return [weight.detach() for weight in weights]


def _adamw(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, betas=s.betas, eps=s.epsilon, weight_decay=decay)


def _sgd(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        weights, lr=1.0, momentum=s.momentum, nesterov=s.nesterov, weight_decay=decay
    )


def _lion(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lion

    return Lion(weights, betas=s.betas, weight_decay=decay)


def _lamb(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    """Theirs corrects the bias of no moment, which without decay is a scale of the update.

    Weights of one dimension are not scaled, so that LAMB is Adam there.
    """
    from pytorch_optimizer import Lamb

    if weights[0].dim() < 2:
        return _adamw(weights, s, 0.0)
    lamb = Lamb(weights, betas=s.betas, eps=s.epsilon, weight_decay=decay)
    lamb.clamp = 1e9
    lamb.param_groups[0]["adam_debias"] = True
    return lamb


def _plain(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    """The paper's formulas, weight by weight."""
    del decay
    return plain_optimizer(weights, s)


def _schedule_free(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    oracle = AdamWScheduleFree(weights, betas=s.betas, eps=s.epsilon, weight_decay=decay)
    oracle.train()
    return oracle


def _muon(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    if weights[0].dim() < 2:
        return _adamw(weights, s, decay)
    return torch.optim.Muon(
        weights, weight_decay=decay, momentum=s.momentum, nesterov=s.nesterov,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip


def _adafactor(weights: list[Tensor], s: TrainSettings, decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(weights, eps=(s.epsilon, 1e-3), weight_decay=decay)


def _fixed_adafactor(
    weights: list[Tensor], s: TrainSettings, decay: float
) -> torch.optim.Optimizer:
    """That of transformers, whose decay is the same, with no relative step."""
    from transformers import Adafactor

    return Adafactor(weights, lr=1.0, relative_step=False, scale_parameter=False,
                     eps=(s.epsilon, 1e-3), weight_decay=decay)  # fmt: skip


ORACLES: list[tuple[str, dict[str, object], OracleFactory]] = [
    ("adamw", {}, _adamw),
    ("sgd", {}, _sgd),
    ("sgd", {"nesterov": True, "momentum": 0.8}, _sgd),
    ("lion", {}, _lion),
    ("muon", {}, _muon),
    ("muon", {"nesterov": False}, _muon),
    ("schedule-free", {}, _schedule_free),
    ("schedule-free", {"betas": (0.7, 0.99), "schedule": "cosine"}, _schedule_free),
    ("schedule-free", {}, _plain),
    ("lamb", {}, _plain),
    ("adafactor", {"weight_decay": 0.1}, _adafactor),
    ("adafactor", {"learning_rate": 0.2, "warmup": 0.0}, _adafactor),
    ("adafactor", {"relative_step": False}, _fixed_adafactor),
    ("adafactor", {"weight_decay": 0.1, "epsilon": 1e-6}, _plain),
    ("lamb", {"weight_decay": 0.0, "epsilon": 1e-15}, _lamb),
]


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize(("name", "changes", "factory"), ORACLES)
def test_fifty_updates_are_those_of_the_oracle(
    name: str, changes: dict[str, object], factory: OracleFactory, divisor: float | None
):
    settings = settings_of(name, **changes)
    weights, optimizer = new_weights(settings), Optimizer(settings, CPU)
    for step, current in enumerate(gradients(settings), start=1):
        for weight, gradient in zip(weights, current, strict=True):
            weight.gradient = gradient
        optimizer.update(weights, step, None if divisor is None else torch.tensor(divisor))
    expected = oracle_weights(factory, settings, divisor or 1.0)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.master, reference, **CLOSE)
        assert float(weight.steps) == STEPS


def test_muon_updates_matrices_that_are_one_weight_as_torch_updates_each():
    settings = settings_of("muon")
    rows, columns = (16, 4, 40), 24
    whole = torch.randn(sum(rows), columns, generator=torch.Generator().manual_seed(0))
    state = StateFormat(optimizer_law("muon"))
    weight = new_master_parameter("qkv", whole.clone(), whole, state, decays=True, matrix=True)
    parts = [part.clone().requires_grad_() for part in whole.split(rows)]
    optimizer = Optimizer(settings, CPU, joined={"qkv": rows})
    oracle = _muon(parts, settings, settings.weight_decay)
    draws = torch.Generator().manual_seed(1)

    for step in range(1, 6):
        gradient = torch.randn(whole.shape, generator=draws)
        weight.gradient = gradient.clone()
        for part, own in zip(parts, gradient.split(rows), strict=True):
            part.grad = own.clone()
        oracle.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.update([weight], step, None)
        oracle.step()

    expected = torch.cat([part.detach() for part in parts])
    # A matrix with a shorter longest side is scaled in bfloat16, the type of its direction.
    torch.testing.assert_close(weight.master, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_the_numbers_that_ranks_sum_after_a_pass_are_those_that_are_priced(name: str):
    settings = settings_of(name)
    weights = new_weights(settings)
    for weight, gradient in zip(weights, next(gradients(settings)), strict=True):
        weight.gradient = gradient
    ranks = CountingRanks(weights)
    Optimizer(settings, CPU).update(weights, 1, None, ranks)
    law = optimizer_law(settings.optimizer)
    assert ranks.counts == [
        {w.name: law.summed_elements(index, tuple(w.master.shape)) for w in weights}
        for index in range(law.passes - 1)
    ]


class CountingRanks(SingleRank):
    """One rank that notes how many numbers of each weight it is asked to sum."""

    def __init__(self, weights: list[MasterParameter]) -> None:
        super().__init__(weights)
        self.counts: list[dict[str, int]] = []

    def sum(
        self, own: Mapping[str, Tensor], length: Callable[[tuple[int, ...]], int]
    ) -> Mapping[str, Tensor]:
        self.counts.append({name: len(sums) for name, sums in own.items()})
        return super().sum(own, length)
