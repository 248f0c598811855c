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
from windlass.runtime.generate import SamplingOptions, generate
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train
from windlass.schema.plan import Plan
from windlass.schema.request import TrainRequest

Trained = tuple[LayerStack, Checkpoint | None]


@pytest.fixture
def trained(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainRequest],
    folder: Path,
):
    stack = gpt(device="meta")
    cut = plan(stack)
    asked = settings(steps=40, warmup=0.1)
    context = RankContext(
        plan=cut, stack=stack, program=program(cut), settings=asked, checkpoints=folder
    )
    list(train(context, batches()))
    return stack, latest_checkpoint(folder)


def text(
    trained: Trained, prompt: bytes = b"word1 word", count: int = 40, **options: float
) -> list[int]:
    return list(generate(*trained, list(prompt), SamplingOptions(count=count, **options)))


def test_the_same_seed_writes_the_same(trained: Trained):
    assert text(trained, seed=1) == text(trained, seed=1)
    assert text(trained, seed=1) != text(trained, seed=2)


def test_it_goes_on_beyond_the_longest_sequence_that_the_model_takes(trained: Trained):
    assert len(text(trained, count=50)) == 50


def test_without_temperature_the_seed_does_not_matter_and_only_the_likeliest_is_drawn(
    trained: Trained,
):
    greedy = text(trained, temperature=0)
    assert greedy == text(trained, temperature=0, seed=9)
    assert greedy == text(trained, top_k=1)


def test_it_learned_which_bytes_there_are(trained: Trained):
    known = set(b"word0123456789 ")
    assert set(text(trained, top_k=5)) <= known


def test_it_stops_at_the_end_of_text(trained: Trained):
    greedy = text(trained, temperature=0)
    end = greedy[5]
    assert text(trained, temperature=0, end_token=end) == greedy[: greedy.index(end)]


def test_a_checkpoint_of_another_model_is_refused(trained: Trained, gpt: Callable[..., LayerStack]):
    with pytest.raises(CheckpointError, match="another model"):
        text((gpt(width=48), trained[1]))


def test_no_prompt_is_refused(trained: Trained):
    with pytest.raises(ValueError, match="no token"):
        text(trained, prompt=b"")


def test_evaluation_draws_nothing_from_torch(trained: Trained):
    before = torch.random.get_rng_state()
    text(trained, count=2)
    assert torch.equal(before, torch.random.get_rng_state())
