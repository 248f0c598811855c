"""A run's model as a model of lm-evaluation-harness.

import lm_eval
from windlass.integrations.lm_eval import WindlassLM

windlass.export("last", to="hf:exported")
model = WindlassLM(windlass.load_language_model("last"), Path("exported"))
results = lm_eval.simple_evaluate(model=model, tasks=["arc_easy"])
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.errors import RequestError

_huggingface = import_module("lm_eval.models.huggingface")
_transformers = import_module("transformers")

_DRAWN = ("temperature", "top_k", "top_p", "repetition_penalty")
_LEFT_OUT = {"attention_mask": None, "do_sample": None, "use_cache": None, "num_beams": 1}
"""Arguments of a generation that change nothing here, or with that value alone."""


class ScoredModel(Protocol):
    """What the harness needs of a model."""

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence that it reads; None if it sets no limit."""

    def log_likelihoods(self, choices: Sequence[EncodedChoice]) -> list[ChoiceLikelihood]:
        """How likely it finds each choice."""


class WindlassLM(_huggingface.HFLM):  # type: ignore[misc,name-defined]
    """A model that the harness asks; `simple_evaluate(model=...)` takes it.

    Tokens, chat templates, windows and stop words are those of the harness's own `hf` model, with
    the tokenizer that an export of the run has; the passes are ours, all texts of a kind at once.

    Args:
        model: the model of a run, which `windlass.load_language_model` loads.
        folder: a folder with the small files of its export: tokenizer and `config.json`.
    """

    def __init__(self, model: ScoredModel, folder: Path) -> None:
        self._scored = model
        config = (
            _transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if (folder / "config.json").is_file()
            else SimpleNamespace(model_type="windlass")
        )
        shell = SimpleNamespace(config=config, device=torch.device("cpu"), name_or_path=str(folder))
        tokenizer = _transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        super().__init__(
            pretrained=shell, tokenizer=tokenizer, backend="causal", max_length=model.max_sequence
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_more: object
    ) -> list[tuple[float, bool]]:
        choices = [EncodedChoice(tuple(before), tuple(tokens)) for _, before, tokens in requests]
        longest = max((len(choice.tokens) for choice in choices), default=0)
        if longest > self.max_length:
            raise RequestError(
                f"a choice or target has {longest:,} tokens, and the model reads "
                f"{self.max_length:,}; leave its question out of the task"
            )
        return [(one.nats, one.is_greedy) for one in self._scored.log_likelihoods(choices)]

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],  # of a package without types
        disable_tqdm: bool = False,
    ) -> list[float]:
        """The log-likelihood of whole texts, whose windows are all asked at once."""
        self.batch_size_per_gpu = 2**31
        try:
            return list(super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))
        finally:
            self.batch_size_per_gpu = 1

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: Sequence[str], **options: object
    ) -> torch.Tensor:
        """The tokens of one context and what follows, up to the first of the words that end it."""
        generate: Callable[..., Iterator[int]] | None = getattr(self._scored, "generate", None)
        other = [
            f"`{name}` = {value!r}"
            for name, value in options.items()
            if name not in _DRAWN and not (name in _LEFT_OUT and _LEFT_OUT[name] in (None, value))
        ]
        if generate is None or other:
            raise RequestError(
                f"a task asks for {other[0]} in what it generates, which is not computed here"
                if other
                else "ranks of a plan write no text, as a task asks for; leave the keys of the "
                "plan out"
            )
        drawn: dict[str, Any] = {  # of a package without types
            name: options[name] for name in _DRAWN if options.get(name) is not None
        }
        if not options.get("do_sample", drawn.get("temperature", 0.0) > 0):
            drawn["temperature"] = 0.0
        (before,) = context.tolist()
        tokens: list[int] = []
        for token in generate(before, max_length - len(before), **drawn):
            tokens.append(token)
            if any(word in self.tok_decode(tokens) for word in stop):
                break
        return torch.tensor([[*before, *tokens]])
