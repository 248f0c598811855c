"""What a request may say of absent weights, and what it may not."""

from pathlib import Path

import pytest

from windlass.errors import InputErrors
from windlass.schema import ModelIdentity, Plan, Request
from windlass.schema.plan import Batch, Stage


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["sparsity.level=1"], ["`sparsity.level` = 1: should be the share of weights that are"]),
        (["sparsity.level=-0.1"], ["`sparsity.level` = -0.1: should be the share of weights"]),
        (["sparsity.level=nan"], ["`sparsity.level` = "]),
        (["sparsity.block=48"], ["`sparsity.block` = 48: should be one of 16, 32, 64, 128"]),
        (["sparsity.pattern=4:2"], ["`sparsity.pattern` = '4:2': should be `block`, `block-diag"]),
        (["sparsity.pattern=blok"], ["`sparsity.pattern` = 'blok': should be `block`"]),
        (
            ["sparsity.roles.gate=0.5"],
            ["`gate` should be one of query, key, value, projection"],
        ),
        (["sparsity.roles.up=1.5"], ["`sparsity.roles.up` = 1.5: input should be less than 1"]),
        (["sparsity=0.5"], ["`sparsity` = 0.5: should be a table of keys"]),
        (
            ["sparsity.pattern=2:4", "sparsity.level=0.875", "sparsity.distribution=erdos-renyi"],
            [
                "`level` = 0.875, but `pattern` = 2:4 keeps 2 of 4 weights, a level of 0.5",
                "`distribution` = erdos-renyi with `pattern` = 2:4, which has one level",
            ],
        ),
        (
            ["sparsity.mask=x", "sparsity.level=0.5", "sparsity.modules=*.up"],
            ["`level` with `mask` = 'x', which decides it", "`modules` with `mask` = 'x'"],
        ),
        (
            ["sparsity.level=2", "sparsity.block=5", "sparsity.schedul=rigl"],
            ["`sparsity.level` = 2", "`sparsity.block` = 5", "did you mean `sparsity.schedule`?"],
        ),
    ],
)
def test_every_fault_of_a_request_is_told_at_once(words: list[str], messages: list[str]):
    with pytest.raises(InputErrors) as refused:
        Request.resolve(None, words)
    for message in messages:
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["sparsity.block=32"], 0.875),
        (["sparsity.pattern=1:4"], 0.75),
        (["sparsity.pattern=2:4", "sparsity.roles.query=0"], 0.5),
        (["sparsity.level=0.3"], 0.3),
    ],
)
def test_a_level_that_is_left_out_follows_from_the_pattern(words: list[str], level: float):
    sparsity = Request.resolve(None, words).sparsity
    assert sparsity is not None
    assert sparsity.target_level == level


def test_a_request_and_a_plan_keep_their_sparsity_in_their_files(tmp_path: Path):
    words = ["sparsity.level=0.75", "sparsity.roles.up=0.5", "sparsity.modules=['*.a', '*.b']"]
    request = Request.resolve(None, [*words, "model.layers=2"])
    request.save(tmp_path / "request.toml")
    loaded = Request.load(tmp_path / "request.toml")
    assert loaded == request
    assert loaded.model_identity.sparsity == request.sparsity
    plan = Plan(
        graph="a@b", machine="c@d", model=request.model_identity, batch=Batch(sequence=8, micro=1),
        stages=(Stage(phases=((0, 1),)),),
    )  # fmt: skip
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml").model == request.model_identity


def test_a_models_identity_is_its_dials_and_its_sparsity_and_nothing_that_was_not_said():
    request = Request.resolve(None, ["model.layers=2", "sparsity.level=0.75"])
    identity = request.model_identity
    assert identity.model_fields_set == {"layers", "sparsity"}
    assert identity.dense == request.model
    assert identity.dense.model_fields_set == {"layers"}
    assert Request().model_identity == ModelIdentity()
