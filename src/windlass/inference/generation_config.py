"""How the folder of a model says that its text is drawn, and where it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.document import read_json_object
from windlass.errors import RequestError
from windlass.schema import GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE

_TEMPERATURE, _TOP_K = 0.8, 40
"""Those of a model whose folder says nothing."""
_LIBRARY_TOP_K = 50
"""Default of transformers where a folder says that tokens are drawn, and not from how many."""
_LIBRARY_KEYS = frozenset(
    {"no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "min_p", "typical_p",
     "epsilon_cutoff", "eta_cutoff"}
)  # fmt: skip
_OTHER_TEXT = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0.0, "guidance_scale": 1.0,
    "dola_layers": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "constraints": None,
    "begin_suppress_tokens": None, "min_length": 0, "min_new_tokens": 0, "sequence_bias": None,
    "watermarking_config": None, "stop_strings": None, "top_h": None,
}  # fmt: skip
"""Keys that make another text and are not computed here, with the value that leaves each out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How tokens are drawn unless a command says otherwise, and where a text ends."""

    temperature: float = _TEMPERATURE
    top_k: int | None = _TOP_K
    top_p: float | None = None
    repetition_penalty: float = 1.0
    library: Mapping[str, Any] = field(default_factory=dict)
    """Keys that transformers computes (`Any`: JSON)."""
    end_tokens: frozenset[int] = frozenset()
    """None if neither file of the folder names one."""


def generation_config(folder: Path) -> GenerationConfig:
    """What a run folder says, in its copies of `generation_config.json` and `config.json`.

    Temperature and the like count where the folder says that tokens are drawn (`do_sample`); one
    that says that they are not takes the likeliest token.

    Raises:
        RequestError: the file cannot be read, or asks for a text that is written in another way.
    """
    settings, config = (
        read_json_object(path, RequestError) if (path := folder / name).is_file() else {}
        for name in (GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE)
    )
    for key, value in _OTHER_TEXT.items():
        if settings.get(key) not in (None, value):
            raise RequestError(
                f"`{folder / GENERATION_CONFIG_FILE}` asks for `{key}` = {settings[key]!r}, which "
                "is not computed here; export the model (`windlass export RUN --to hf:DIR`), and "
                "let transformers write"
            )
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    end_tokens = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
    if not all(type(token) is int for token in end_tokens):
        raise RequestError(f"`eos_token_id` of `{folder}` is no token id: {ends!r}")
    always = GenerationConfig(
        repetition_penalty=settings.get("repetition_penalty") or 1.0,
        library={key: settings[key] for key in _LIBRARY_KEYS & settings.keys()},
        end_tokens=end_tokens,
    )
    draws = settings.get("do_sample")
    if draws is None:
        return always
    return replace(
        always,
        temperature=_value(settings, "temperature", 1.0) if draws else 0.0,
        top_k=_value(settings, "top_k", _LIBRARY_TOP_K) or None,
        top_p=_value(settings, "top_p", None),
    )


def _value(settings: Mapping[str, Any], key: str, default: Any) -> Any:  # noqa: ANN401  JSON
    value = settings.get(key)
    return default if value is None else value
