"""Text from a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from windlass.data.batches import Batches
from windlass.errors import CheckpointError
from windlass.models.layer_stack import LayerStack
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from windlass.runtime.inference.generate import SamplingOptions, generate_text
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.request import TrainSettings

Trained = tuple[LayerStack, Checkpoint | None]


@pytest.fixture
def trained(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
):
    stack = gpt(device="meta")
    run_plan = plan(stack)
    request = settings(steps=40, warmup=0.1)
    context = RankContext(
        plan=run_plan, stack=stack, program=program(run_plan), settings=request, checkpoints=folder
    )
    list(train_loop(context, batches()))
    return stack, latest_checkpoint(folder)


def text(
    trained: Trained, prompt: bytes = b"word1 word", count: int = 40, **options: float
) -> list[int]:
    return list(
        generate_text(
            InferenceModel(*trained), list(prompt), SamplingOptions(count=count, **options)
        )
    )


def test_the_same_seed_generates_the_same_text(trained: Trained):
    assert text(trained, seed=1) == text(trained, seed=1)
    assert text(trained, seed=1) != text(trained, seed=2)


def test_generation_continues_beyond_the_longest_sequence_of_the_model(trained: Trained):
    assert len(text(trained, count=50)) == 50


def test_at_temperature_zero_the_most_likely_token_is_taken_whatever_the_seed(
    trained: Trained,
):
    greedy = text(trained, temperature=0)
    assert greedy == text(trained, temperature=0, seed=9)
    assert greedy == text(trained, top_k=1)


def test_the_trained_model_generates_bytes_of_its_corpus(trained: Trained):
    known = set(b"word0123456789 ")
    assert set(text(trained, top_k=5)) <= known


def test_generation_stops_at_the_end_token(trained: Trained):
    greedy = text(trained, temperature=0)
    end = greedy[5]
    assert text(trained, temperature=0, end_token=end) == greedy[: greedy.index(end)]


def test_a_checkpoint_of_another_model_is_refused(trained: Trained, gpt: Callable[..., LayerStack]):
    with pytest.raises(CheckpointError, match="another model"):
        text((gpt(width=48), trained[1]))


def test_an_empty_prompt_is_refused(trained: Trained):
    with pytest.raises(ValueError, match="no token"):
        text(trained, prompt=b"")


def test_generation_leaves_the_default_generator_unchanged(trained: Trained):
    before = torch.random.get_rng_state()
    text(trained, count=2)
    assert torch.equal(before, torch.random.get_rng_state())
