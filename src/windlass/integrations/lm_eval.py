"""A run's model as a model of lm-evaluation-harness.

import lm_eval
from windlass.integrations.lm_eval import WindlassLM

model = WindlassLM(windlass.load_language_model("last"))
results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

from windlass.data import ChoiceLikelihood, EncodedChoice, Tokenizer

_model, _utils = import_module("lm_eval.api.model"), import_module("lm_eval.utils")

_MAX_NEW_TOKENS = 256
"""Most tokens that a task gets that does not say how many; the harness's own default."""


class ScoredModel(Protocol):
    """What the harness needs of a model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that it was trained with."""

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence that it reads; None if it sets no limit."""

    def log_likelihoods(self, choices: Sequence[EncodedChoice]) -> list[ChoiceLikelihood]:
        """How likely it finds each choice."""

    def generate(
        self, prompt: Sequence[int], tokens: int, *, temperature: float, top_k: int | None,
        top_p: float | None,
    ) -> Iterator[int]:  # fmt: skip
        """Tokens behind a prompt, at most `tokens`."""


class WindlassLM(_model.TemplateLM):  # type: ignore[misc,name-defined]
    """A model that the harness asks; `simple_evaluate(model=...)` takes it.

    Args:
        model: the model of a run, which `windlass.load_language_model` loads.
        longest: most tokens of a row, for a model that sets no limit.
    """

    def __init__(self, model: ScoredModel, *, longest: int = 2048) -> None:
        super().__init__()
        self._scored = model
        self.max_length = model.max_sequence or longest
        """Most tokens that the model reads."""

    @property
    def eot_token_id(self) -> int:
        """The end of a text, which stands before texts without a context too."""
        return self._scored.tokenizer.end_of_text

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,  # noqa: ARG002  the harness's own
        **_more: object,
    ) -> list[int]:
        """Tokens of a text, none of them special."""
        return self._scored.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_more: object
    ) -> list[tuple[float, bool]]:
        choices = [EncodedChoice(tuple(before), tuple(tokens)) for _, before, tokens in requests]
        return [(one.nats, one.is_greedy) for one in self._scored.log_likelihoods(choices)]

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],  # of a package without types
        disable_tqdm: bool = False,  # noqa: ARG002  the harness's own
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of what the model reads."""
        texts = [
            [
                (None, *_utils.make_disjoint_window(window))
                for window in _utils.get_rolling_token_windows(
                    self.tok_encode(*request.args), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        windows = self._loglikelihood_tokens([window for text in texts for window in text])
        values = (nats for nats, _ in windows)
        return [sum(next(values) for _ in text) for text in texts]

    def generate_until(
        self,
        requests: Sequence[Any],  # of a package without types
        disable_tqdm: bool = False,  # noqa: ARG002  the harness's own
    ) -> list[str]:
        """The text behind each context, up to the first of the words that end it."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        samples = options.get("do_sample", options.get("temperature", 0) > 0)
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        count = min(options.get("max_gen_toks", _MAX_NEW_TOKENS), self.max_length - 1)
        prompt = self.tok_encode(context)[-(self.max_length - count) :] or [self.eot_token_id]
        tokens = self._scored.generate(
            prompt,
            count,
            temperature=options.get("temperature", 1.0) if samples else 0.0,
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
        )
        text = ""
        for piece in self._scored.tokenizer.stream_decode(tokens):
            text += piece
            ends = [text.index(word) for word in until if word in text]
            if ends:
                return text[: min(ends)]
        return text
