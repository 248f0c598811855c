"""What a `generation_config.json` makes of logits before a token is drawn."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from windlass.errors import RequestError

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
