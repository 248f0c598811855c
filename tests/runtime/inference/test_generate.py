"""Text from a checkpoint."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, strategies as st
from hypothesis.extra.numpy import arrays

from windlass.data.batches import Batches
from windlass.errors import CheckpointError, InputErrors
from windlass.models.build import build_layer_stack
from windlass.models.catalog import apply_model_arguments, model_config
from windlass.models.layer_stack import LayerStack, layer_stack_from_module
from windlass.models.transformer import build_transformer
from windlass.program.instruction import Program
from windlass.runtime.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from windlass.runtime.inference.generate import (
    SamplingOptions,
    _drawer,
    _probabilities,
    generate_text,
    repetition_penalty,
)
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.plan import Plan
from windlass.schema.train_request import TrainSettings

Trained = tuple[LayerStack, Checkpoint | None]


@pytest.fixture(scope="module")
def trained(
    gpt: Callable[..., LayerStack],
    plan: Callable[..., Plan],
    program: Callable[[Plan], Program],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path_factory: pytest.TempPathFactory,
):
    stack, folder = gpt(device="meta"), tmp_path_factory.mktemp("trained")
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


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-9])
def test_the_lowest_temperature_takes_the_likeliest_token(temperature: float):
    logits = torch.tensor([3.0, 80.0, -5.0, 79.0])
    options = SamplingOptions(count=1, temperature=temperature)
    assert _drawer(options)([0], logits, torch.Generator().manual_seed(0)) == 1


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
    assert text(trained, temperature=0, end_tokens=frozenset({end})) == greedy[: greedy.index(end)]


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


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 9, "seed": 3}, {"top_p": 0.7}])
def test_a_text_is_the_same_with_and_without_the_cache(
    model: str, split: bool, options: dict[str, float]
) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 97, "sequence": 40}
    sizes |= {"kv_heads": 2, "ffn": 48} if model == "llama-tiny" else {}
    stack = build_layer_stack(model, {**sizes, "split_blocks": split}, device="cpu")
    drawn = InferenceModel(stack, None)

    # 60 tokens are more than the model reads, so that the cache ends on the way.
    texts = [
        list(generate_text(drawn, [5, 7, 9], SamplingOptions(count=60, kv_cache=kept, **options)))
        for kept in (True, False)
    ]

    assert texts[0] == texts[1]
    assert len(texts[0]) == 60


def test_layers_that_take_turns_in_memory_keep_keys_and_values_and_write_the_same_text(
    trained: Trained,
) -> None:
    streamed = InferenceModel(*trained, phases=3)
    caches, options = streamed.new_caches(), SamplingOptions(count=30, seed=4)
    assert caches is not None

    pieces = list(generate_text(streamed, list(b"word1"), options))

    assert pieces == list(generate_text(InferenceModel(*trained), list(b"word1"), options))
    logits = [streamed.next_logits(list(b"word1"[:end]), caches) for end in (3, 4, 5)]
    # The last passes read one token each, as `caches` holds the others.
    assert caches.tokens == 5
    assert int(logits[-1].argmax()) == int(streamed.next_logits(list(b"word1"), None).argmax())


def test_logits_with_the_cache_are_those_without(gpt: Callable[..., LayerStack]) -> None:
    model = InferenceModel(gpt(), None)
    caches, tokens = model.new_caches(), [3, 1, 4, 1, 5, 9, 2, 6]

    for length in (3, 4, 5, 6, 7, 8):
        cached = model.next_logits(tokens[:length], caches)
        plain = model.logits(torch.tensor([tokens[:length]]))[0, -1]
        torch.testing.assert_close(cached, plain)


@pytest.mark.parametrize("name", ["gemma2-2b", "gemma3-270m", "qwen3-8b", "gpt-neox-20b"])
def test_logits_with_the_cache_are_those_without_also_under_a_sliding_window(name: str) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 97, "sequence": 40}
    sizes |= {} if name.startswith("gpt") else {"kv_heads": 2, "ffn": 48}
    config = apply_model_arguments(model_config(name), sizes)
    if config.sliding_window is not None:
        config = replace(config, sliding_window=4)
    torch.manual_seed(0)
    model = InferenceModel(layer_stack_from_module(build_transformer(config), name), None)
    caches, tokens = model.new_caches(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

    for length in range(2, len(tokens) + 1):
        cached = model.next_logits(tokens[:length], caches)
        plain = model.logits(torch.tensor([tokens[:length]]))[0, -1]
        torch.testing.assert_close(cached, plain)
    assert caches is not None


def test_few_tokens_are_drawn_from_that_together_have_most_of_the_probability() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    drawn = {
        share: {
            _drawer(SamplingOptions(count=1, top_p=share))([0], logits, generator)
            for _ in range(200)
        }
        for share in (0.4, 0.5, 0.7, 0.9, 1.0)
    }

    assert drawn == {0.4: {0}, 0.5: {0}, 0.7: {0, 1}, 0.9: {0, 1, 2}, 1.0: {0, 1, 2, 3}}


@given(
    logits=arrays(np.float32, 40, elements=st.floats(-20, 20, width=32), unique=True),
    tokens=st.lists(st.integers(0, 39), min_size=1, max_size=30),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(1, 40),
    top_p=st.floats(0.05, 1),
    penalty=st.floats(0.5, 2),
)
def test_probabilities_are_those_of_the_processors_of_transformers(
    logits: npt.NDArray[np.float32],
    tokens: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
) -> None:
    from transformers.generation import logits_process as theirs

    options = SamplingOptions(
        count=1, temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty
    )
    scores, ids = torch.from_numpy(logits.copy())[None], torch.tensor([tokens])
    for processor in (
        theirs.RepetitionPenaltyLogitsProcessor(penalty),
        theirs.TemperatureLogitsWarper(temperature),
        theirs.TopKLogitsWarper(top_k),
        theirs.TopPLogitsWarper(top_p),
    ):
        scores = processor(ids, scores)

    ours = _probabilities(
        repetition_penalty(penalty)(tokens, torch.from_numpy(logits.copy())), options
    )

    expected = torch.softmax(scores, dim=-1)[0]
    # A sum of probabilities beside `top_p` may fall either way.
    sums = ours.sort(descending=True).values.cumsum(0)
    assume(bool(((sums - top_p).abs() > 1e-4).all()) or top_p == 1)
    torch.testing.assert_close(ours / ours.sum(), expected, atol=1e-6, rtol=1e-4)


def test_all_options_that_nothing_can_be_drawn_with_are_named_at_once() -> None:
    with pytest.raises(InputErrors) as caught:
        SamplingOptions(count=-1, temperature=-1, top_k=0, top_p=1.5)

    named = ("tokens", "temperature", "top_k", "top_p")
    for name, message in zip(named, caught.value.messages, strict=True):
        assert message.startswith(f"`{name}` = ")
