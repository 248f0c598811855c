"""What the torch stack refuses, and that no plan which the planner proposes for it is refused."""

import random

import pytest

from windlass import api
from windlass.errors import InputErrors, PlanError
from windlass.program.stack_capabilities import capability_faults
from windlass.stacks import load_stack

TORCH = load_stack("torch")


def random_words(draw: random.Random) -> tuple[str, ...]:
    """A random request for some machine."""
    model = draw.choice(("gpt2-124m", "llama3.2-1b", "bert-large", "llama3-8b", "gpt2-1.5b"))
    words = [f"train.batch={draw.choice((64, 96, 128))}", f"machine={draw.choice(MACHINES)}"]
    words += draw.sample(
        ("parallel.data=8", "parallel.tensor=2", "parallel.pipeline=2", "recompute=full",
         "sharding.parameters=8", "precision=bfloat16", "batch.micro=1", "compile=true"),
        k=draw.randint(0, 2),
    )  # fmt: skip
    return (model, *words)


MACHINES = ("dgx-h100", "dgx-a100-80gb:2", "dgx-h100:4")


def require_sayable(words: tuple[str, ...]) -> bool:
    """Whether there is a plan for a request; it is one that the engine runs."""
    try:
        planned = api.plan(*words, stack="torch")
    except (PlanError, InputErrors):
        return False
    assert not list(capability_faults(planned.plan, TORCH)), planned.plan.to_toml()
    return True


def test_a_proposed_plan_is_one_that_the_engine_runs() -> None:
    assert require_sayable(("gpt2-124m", "machine=dgx-h100", "train.batch=64"))


@pytest.mark.slow
def test_a_hundred_proposed_plans_are_ones_that_the_engine_runs() -> None:
    draw = random.Random(7)
    assert sum(require_sayable(random_words(draw)) for _ in range(100)) >= 60


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["parallel.data=2", "sharding.optimizer=2", "sharding.parameters=1"], "ZeRO-1"),
        (["parallel.pipeline=2", "parallel.schedule=zero-bubble"], "zero-bubble schedule"),
        (["train.optimizer=lion"], "optimizer `lion`"),
        (["train.ema=0.9"], "averages of weights"),
        (["moments=int8"], "optimizer moments in int8"),
        (["phases=2"], "weights that lie outside device memory"),
        (["sparsity.level=0.5", "sparsity.block=32"], "sparse weights"),
        (["precision=float16"], "computation in float16"),
    ],
    ids=str,
)
def test_what_the_engine_cannot_run_is_refused_by_name(words: list[str], refusal: str) -> None:
    with pytest.raises((PlanError, InputErrors), match=refusal):
        api.plan("gpt-tiny", "machine=dgx-h100", *words, stack="torch")
