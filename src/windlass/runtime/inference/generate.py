"""Text generation, one token at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from windlass.errors import InputErrors, RequestError
from windlass.runtime.inference.inference_model import InferenceModel

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""Maps the tokens so far and the logits `Float[v]` of the next one to other logits."""

BEFORE_TEMPERATURE = {
    "no_repeat_ngram_size": ("NoRepeatNGramLogitsProcessor", 0),
    "bad_words_ids": ("NoBadWordsLogitsProcessor", None),
    "suppress_tokens": ("SuppressTokensLogitsProcessor", None),
}
"""The classes of transformers that compute a key, in their order there, with what leaves it out."""

BEHIND_TOP_P = {
    "min_p": ("MinPLogitsWarper", None),
    "typical_p": ("TypicalLogitsWarper", 1.0),
    "epsilon_cutoff": ("EpsilonLogitsWarper", 0.0),
    "eta_cutoff": ("EtaLogitsWarper", 0.0),
}
"""Those that count only where tokens are drawn."""


def repetition_penalty(penalty: float) -> LogitsProcessor:
    """Makes tokens of the text so far less likely: logits above 0 divided, others multiplied.

    Source: Keskar et al. 2019, CTRL, in the sign of transformers.
    """

    def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen = torch.tensor(sorted({*tokens}))
        values = logits[seen]
        return logits.index_copy(
            0, seen, torch.where(values < 0, values * penalty, values / penalty)
        )

    return process


def library_processors(
    settings: Mapping[str, Any], table: Mapping[str, tuple[str, Any]]
) -> list[LogitsProcessor]:
    """The processors of transformers for keys of a `generation_config.json`.

    Args:
        settings: the keys; `Any` because they are JSON of their folder.

    Raises:
        RequestError: one is asked for, and transformers is not there, or refuses its value.
    """
    asked = [key for key, (_, none) in table.items() if settings.get(key) not in (None, none)]
    return [_library_processor(key, table[key][0], settings[key]) for key in asked]


def _library_processor(key: str, name: str, value: object) -> LogitsProcessor:
    try:
        logits_process = import_module("transformers.generation.logits_process")
    except ImportError:
        raise RequestError(
            f"`{key}` of the model's `generation_config.json` is computed by transformers; install "
            "it with `pip install 'windlass[hf]'`"
        ) from None
    try:
        library = getattr(logits_process, name)(value)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"`{key}` = {value!r} of the model's `generation_config.json`: {error}"
        ) from None
    return lambda tokens, logits: library(torch.tensor([tokens]), logits[None])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How many tokens to generate, and how to draw them."""

    count: int
    """Number of tokens to generate at most."""
    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to draw from; None draws from all."""
    top_p: float | None = None
    """Probability that the most likely tokens to draw from have together; None draws from all."""
    repetition_penalty: float = 1.0
    """How much less likely tokens of the text so far become; 1 changes nothing."""
    library: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a `generation_config.json`, which transformers computes (`Any`: JSON)."""
    seed: int = 0
    """Seed of the draws."""
    kv_cache: bool = True
    """Whether keys and values of earlier tokens are kept, where the model can; the text is the same
    but for rounding."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the text and are not returned; none always generates `count` tokens."""

    def __post_init__(self) -> None:
        """Refuses options that nothing can be drawn with.

        Raises:
            InputErrors: all of them.
        """
        wrong = {
            f"`tokens` = {self.count}; write 0 or more": self.count < 0,
            f"`temperature` = {self.temperature:g}; write 0 or more, 0 for the likeliest token": (
                not 0 <= self.temperature < math.inf
            ),
            f"`top_k` = {self.top_k}; write 1 or more": self.top_k is not None and self.top_k < 1,
            f"`top_p` = {self.top_p}; write more than 0, and at most 1": (
                self.top_p is not None and not 0 < self.top_p <= 1
            ),
            f"`repetition_penalty` = {self.repetition_penalty:g}; write more than 0": (
                not 0 < self.repetition_penalty < math.inf
            ),
        }
        if any(wrong.values()):
            raise InputErrors([message for message, is_wrong in wrong.items() if is_wrong])


def generate_text(
    model: InferenceModel, prompt: Sequence[int], options: SamplingOptions
) -> Iterator[int]:
    """Tokens that a trained model writes after a prompt, the same for the same seed.

    Args:
        prompt: at least one token; only as many of the last ones count as the model accepts.

    Raises:
        ValueError: the prompt has no token.
    """
    if not prompt:
        raise ValueError("the prompt has no token")
    generator = torch.Generator().manual_seed(options.seed)
    tokens = list(prompt)
    caches = model.new_caches() if options.kv_cache else None
    draw = _drawer(options)
    for _ in range(options.count):
        logits = model.next_logits(tokens, caches)
        token = draw(tokens, logits.float().cpu(), generator)
        if token in options.end_tokens:
            return
        tokens.append(token)
        yield token


def _drawer(
    options: SamplingOptions,
) -> Callable[[Sequence[int], Tensor, torch.Generator], int]:
    """Draws a token from the tokens so far and logits `Float[v]`, in the order of transformers."""
    always: list[LogitsProcessor] = []
    if options.repetition_penalty != 1:
        always.append(repetition_penalty(options.repetition_penalty))
    always += library_processors(options.library, BEFORE_TEMPERATURE)
    drawn = library_processors(options.library, BEHIND_TOP_P) if options.temperature else []

    def draw(tokens: Sequence[int], logits: Tensor, generator: torch.Generator) -> int:
        for process in always:
            logits = process(tokens, logits)
        if options.temperature == 0:
            return int(logits.argmax())
        probabilities = _probabilities(logits, options)
        if drawn:
            logits = probabilities.log()
            for process in drawn:
                logits = process(tokens, logits)
            probabilities = torch.softmax(logits, dim=0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return draw


def _probabilities(logits: Tensor, options: SamplingOptions) -> Tensor:
    """The probability of each token, 0 for those that `top_k` and `top_p` leave out, `Float[v]`."""
    if options.top_k is not None and options.top_k < len(logits):
        threshold = logits.topk(options.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    # In float64, and from the likeliest one: no temperature above 0 makes infinities of it.
    scaled = (logits.double() - logits.max()) / options.temperature
    probabilities = torch.softmax(scaled, dim=0).to(logits.dtype)
    if options.top_p is not None and options.top_p < 1:
        values, order = probabilities.sort(descending=True, stable=True)
        # A token counts whose likelier ones together have less than that probability.
        unlikely = values.cumsum(0) - values >= options.top_p
        probabilities[order[unlikely]] = 0
    return probabilities
