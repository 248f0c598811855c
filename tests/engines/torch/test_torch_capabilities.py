"""What stacks refuse, beside what, and that no plan which the planner proposes is refused."""

import random

import pytest

from windlass import api
from windlass.errors import InputErrors, PlanError
from windlass.program.stack_capabilities import capability_faults
from windlass.stacks import load_stack, stack_names


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


def require_sayable(words: tuple[str, ...], stack: str) -> bool:
    """Whether there is a plan for a request; it is one that the stack runs."""
    try:
        planned = api.plan(*words, stack=stack)
        plan = planned.plan
    except (PlanError, InputErrors):
        return False
    assert not list(capability_faults(plan, load_stack(stack))), plan.to_toml()
    return True


def test_a_proposed_plan_is_one_that_the_engine_runs() -> None:
    assert require_sayable(("gpt2-124m", "machine=dgx-h100", "train.batch=64"), "torch")


@pytest.mark.slow
def test_a_hundred_proposed_plans_are_ones_that_the_engine_runs() -> None:
    draw = random.Random(7)
    assert sum(require_sayable(random_words(draw), "torch") for _ in range(100)) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("stack", stack_names())
def test_what_is_proposed_for_any_stack_is_sayable_in_it(stack: str) -> None:
    draw = random.Random(stack)
    for _ in range(6):
        _, *words = random_words(draw)  # stacks that offload look long at larger models
        require_sayable(("gpt2-124m", *words), stack)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (
            "sharding.optimizer=8 sharding.parameters=1 parallel.data=8",
            (r"has `sharding.parameters=8 sharding.optimizer=8 sharding.reshard=false` "
            r"\(FSDP never resharded\): [+-][0-9.]+ \w+ a step, [+-][0-9.]+ \w+ a device$"),
        ),
        ("parallel.pipeline=2 parallel.schedule=zero-bubble", r"has `parallel.schedule=\w+`: [+-]"),
        ("moments=int8", r"has `moments=float32`: [+-].* a step, \+[0-9.]+ \w+ a device$"),
    ],
)  # fmt: skip
def test_what_a_stack_cannot_run_is_refused_with_the_nearest_plan_and_its_price(
    words: str, nearest: str
) -> None:
    with pytest.raises(InputErrors, match=f"the nearest plan that `torch` can run {nearest}"):
        api.plan("gpt2-124m", "machine=dgx-h100", *words.split(), stack="torch")


def test_a_plan_file_that_a_stack_cannot_run_is_refused_with_the_nearest_plan() -> None:
    words = ("gpt2-124m", "machine=dgx-h100", "sharding.optimizer=8", "sharding.parameters=1")
    plan = api.plan(*words, "parallel.data=8").plan.model_copy(update={"stack": "torch"})

    with pytest.raises(InputErrors, match=r"the nearest plan .* has `sharding.parameters=8 "):
        api.plan(plan=plan)


def test_a_run_that_would_learn_something_else_has_no_nearest_plan() -> None:
    with pytest.raises(InputErrors) as refused:
        api.plan("gpt2-124m", "machine=dgx-h100", "train.ema=0.9", stack="torch")
    assert "nearest" not in str(refused.value)


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
