"""How likely a checkpoint finds given texts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from windlass.data import EncodedChoice
from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from windlass.runtime.checkpoint.load_state import load_weights
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.inference.score_tasks import log_likelihoods
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings

SUM_ERROR = 1e-4
"""Sums of some dozen float32 logarithms, whose products are batched in another way."""


@pytest.fixture
def trained(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> tuple[LayerStack, Checkpoint]:
    stack = gpt(device="meta")
    run_plan = plan(stack)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=settings(),
        checkpoints=tmp_path,
    )  # fmt: skip
    list(train_loop(context, batches()))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    return stack, checkpoint


def plainly(stack: LayerStack, choice: EncodedChoice) -> float:
    """The sum over the tokens, each from a pass of its own through plain modules."""
    tokens = [*choice.context, *choice.tokens]
    total = 0.0
    for end in range(len(choice.context), len(tokens)):
        # Windows end where the row of all tokens does, so that positions are the same.
        row = tokens[-(stack.max_sequence + 1) :] if stack.max_sequence else tokens
        cut = len(tokens) - len(row)
        x = torch.tensor([tokens[cut:end]])
        with torch.no_grad():
            for layer in stack.layers:
                x = layer.eval()(x)
        total += float(torch.log_softmax(x[0, -1].double(), dim=0)[tokens[end]])
    return total


def test_a_score_is_the_sum_that_a_plain_loop_over_logits_gives(
    trained: tuple[LayerStack, Checkpoint], gpt: Callable[..., LayerStack]
) -> None:
    stack, checkpoint = trained
    plain = gpt()
    load_weights(checkpoint, plain)
    choices = [
        EncodedChoice(tuple(b"word1 w"), tuple(b"ord2")),
        EncodedChoice(tuple(b"w"), tuple(b"ord1 word22")),
        EncodedChoice(tuple(b"word1 word2 word3 word4"), tuple(b" wo")),  # longer than the model
        EncodedChoice(tuple(b"word1 "), tuple(b"w")),
    ]

    found = [one.nats for one in log_likelihoods(InferenceModel(stack, checkpoint), choices)]

    assert found == pytest.approx([plainly(plain, one) for one in choices], abs=SUM_ERROR)


def test_a_score_does_not_depend_on_what_else_is_scored(
    trained: tuple[LayerStack, Checkpoint],
) -> None:
    one = EncodedChoice(tuple(b"word1 w"), tuple(b"ord2"))
    others = [EncodedChoice(tuple(b"word"), tuple(b"1 word2 wor")) for _ in range(300)]

    model = InferenceModel(*trained)

    (alone,) = log_likelihoods(model, [one])

    last = log_likelihoods(model, [*others, one])[-1]
    assert last.nats == pytest.approx(alone.nats, abs=SUM_ERROR)


@pytest.mark.parametrize("phases", [2, 4, 99])
def test_a_model_whose_layers_take_turns_in_memory_gives_the_same_scores_bit_for_bit(
    trained: tuple[LayerStack, Checkpoint], phases: int
) -> None:
    choices = [EncodedChoice(tuple(b"word1 w"[:n]), tuple(b"ord2")) for n in range(1, 7)] * 150

    streamed = log_likelihoods(InferenceModel(*trained, phases=phases), choices)

    assert streamed == log_likelihoods(InferenceModel(*trained), choices)


@pytest.mark.parametrize(
    ("before", "choice", "reason"),
    [((), (1,), "at least one"), ((1,), (), "at least one"), ((1,), (1,) * 17, "accepts 16")],
)
def test_what_has_no_likelihood_is_refused(
    trained: tuple[LayerStack, Checkpoint],
    before: tuple[int, ...],
    choice: tuple[int, ...],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        log_likelihoods(InferenceModel(*trained), [EncodedChoice(before, choice)])
