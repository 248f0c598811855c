"""Which stack runs a plan whose request names none."""

import pytest

from windlass import api

GPUS = ("gpt2-124m", "machine=dgx-h100", "train.batch=64", "parallel.data=8")


def test_a_plan_for_several_gpus_runs_on_torch_and_the_first_note_says_why() -> None:
    chosen = api.on_default_stack(api.plan(*GPUS))
    assert chosen.plan.stack == "torch"
    assert "stack `torch`, the default for several GPUs; `--stack windlass` is" in chosen.notes[0]


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (("sharding.optimizer=8", "sharding.parameters=1"), "no sharding of optimizer state"),
        (("train.ema=0.9",), "no averages of weights (`train.ema`)"),
    ],
)
def test_what_torch_cannot_run_stays_with_the_own_runtime_and_the_first_note_says_why(
    words: tuple[str, ...], lacks: str
) -> None:
    chosen = api.on_default_stack(api.plan(*GPUS, *words))
    assert chosen.plan.stack is None
    assert lacks in chosen.notes[0]


@pytest.mark.parametrize(
    "words",
    [("stack=windlass",), ("stack=torchtitan",), ("parallel.data=1", "machine=a100-80gb")],
)
def test_a_stack_that_is_named_and_one_gpu_are_left_as_they_are(words: tuple[str, ...]) -> None:
    planned = api.plan(*GPUS[:3], *words)
    assert api.on_default_stack(planned) is planned
