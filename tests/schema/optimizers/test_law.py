"""The law of each optimizer, and the settings of a request that follow from it."""

from typing import get_args

import pytest

from factories import tiny_graph, tiny_machine
from windlass.errors import InputErrors
from windlass.planner.defaults import resolve_defaults
from windlass.program.layer_mode_errors import offloaded_optimizer_errors
from windlass.runtime.optimizers.updates import UPDATES
from windlass.runtime.optimizers.weight_steps import step_type
from windlass.schema.optimizers import OptimizerName, optimizer_law
from windlass.schema.plan import Batch, Plan, Stage
from windlass.schema.request import Request
from windlass.schema.train_request import TrainSettings

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
STAGE = Stage(phases=((0, 1),))
STAGE = Stage(phases=((0, 1),))
PLAN = Plan(graph="g", machine="m", batch=Batch(sequence=8, micro=1), stages=(STAGE,))


def resolved(*overrides: str) -> TrainSettings:
    request = Request.resolve(overrides=overrides)
    return resolve_defaults(request, tiny_graph(), tiny_machine())[0].train


def test_every_optimizer_has_a_law_and_an_update():
    assert set(UPDATES) == {n for n in NAMES if optimizer_law(n).scope == "element"}
    assert [optimizer_law(name).name for name in NAMES] == list(NAMES)


def test_a_plan_without_an_optimizer_is_of_adamw_and_keeps_its_fingerprint():
    assert optimizer_law(None).name == "adamw"
    assert "optimizer" not in PLAN.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("name", "state"), [(None, 8), ("lion", 4), ("sgd", 4), ("lamb", 8), ("muon", 8)]
)
def test_a_moment_is_four_bytes_of_state_for_each_parameter(name: str | None, state: int):
    plan = PLAN.model_copy(update={"optimizer": name})
    assert plan.state_bytes(1000) == 1000 * state
    masters = plan.model_copy(update={"precision": "bfloat16"})
    assert masters.state_bytes(1000) == 1000 * (state + 4)


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_the_passes_that_are_priced_are_those_that_an_update_takes(name: OptimizerName):
    law, reads = optimizer_law(name), step_type(optimizer_law(name)).reads_gradient
    assert (law.passes, law.gradient_passes) == (len(reads), sum(reads))


def test_adafactor_keeps_a_number_for_each_row_and_column_of_a_matrix():
    plan, law = PLAN.model_copy(update={"optimizer": "adafactor"}), optimizer_law("adafactor")
    assert law.updates_as_matrix((30, 50), hidden=False)
    assert (plan.state_bytes(1500, matrix=True), law.factor_elements((30, 50))) == (0, 30 + 50)
    assert (plan.state_bytes(30), law.factor_elements((30,))) == (4 * 30, 0)


def test_a_fixed_step_of_adafactor_has_the_rate_of_adamw():
    relative = resolved("train.optimizer=adafactor")
    fixed = resolved("train.optimizer=adafactor", "train.relative_step=false")
    assert (relative.learning_rate, relative.relative_step) == (1e-2, True)
    assert (fixed.learning_rate, fixed.relative_step) == (1e-3, False)


def test_settings_that_are_left_open_are_those_of_the_optimizer():
    adamw, lion = resolved(), resolved("train.optimizer=lion")
    assert (adamw.betas, adamw.weight_decay, adamw.learning_rate) == ((0.9, 0.95), 0.1, 1e-3)
    assert (lion.betas, lion.weight_decay) == ((0.9, 0.99), 0.3)
    assert lion.learning_rate == pytest.approx(3e-4)
    assert resolved("train.optimizer=lion", "train.betas=0.8,0.9").betas == (0.8, 0.9)


def test_the_learning_rate_of_an_optimizer_says_where_it_comes_from():
    request = Request.resolve(overrides=("train.optimizer=lion",))
    reasons = {d.key: d.reason for d in resolve_defaults(request, tiny_graph(), tiny_machine())[1]}
    reason = reasons["train.learning_rate"]
    assert "0.3 of AdamW's" in reason
    assert "Chen et al. 2023" in reason
    assert "AdamW's is 0.001 for models below 30 M parameters" in reason


def test_the_rate_of_lamb_goes_with_the_root_of_the_batch():
    rates = [
        resolved("train.optimizer=lamb", f"train.batch={b}").learning_rate for b in (512, 8192)
    ]
    assert rates == pytest.approx([5 / (2**3 * 1000), 5 / (2 * 1000)])


def test_an_optimizer_of_whole_weights_keeps_its_state_in_device_memory():
    assert not list(offloaded_optimizer_errors("lion", 8))
    assert not list(offloaded_optimizer_errors("lamb", 1))
    for name, parts in (("lamb", 2), ("adafactor", 2), ("muon", 1)):
        (error,) = offloaded_optimizer_errors(name, parts)
        assert "set `offload.optimizer` = device" in error


@pytest.mark.parametrize("name", NAMES)
def test_chosen_settings_survive_a_file(name: OptimizerName):
    settings = resolved(f"train.optimizer={name}")
    assert TrainSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.optimizer=sgd", "train.betas=0.5,0.6"),
        ("train.optimizer=lion", "train.momentum=0.5"),
        ("train.nesterov=true",),
        ("train.relative_step=true",),
        ("train.optimizer=adamx",),
    ],
)
def test_a_setting_that_an_optimizer_has_not_is_refused(overrides: tuple[str, ...]):
    with pytest.raises(InputErrors, match=r"leave it out|input should be 'adamw'"):
        Request.resolve(overrides=overrides)
