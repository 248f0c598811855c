"""A `tokenizer.json` as the vocabulary of a GGUF file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Types of tokens. Source: `gguf.TokenType`."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf"{_LETTERS}\p{{N}}{_REST}": "qwen2",
}
"""Patterns that split a text into words, and the names that llama.cpp gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokens of a byte-level BPE."""

    tokens: tuple[str, ...]
    """Token of each id, as many as the model has."""
    types: tuple[int, ...]
    merges: tuple[str, ...]
    words: str
    """How a text is split into words, by llama.cpp's name."""


def gguf_vocabulary(tokenizer: bytes, size: int) -> GgufVocabulary:
    """The vocabulary of a tokenizer.

    Args:
        tokenizer: content of a `tokenizer.json`.
        size: entries of the model's vocabulary; those beyond the tokenizer's are unused.

    Raises:
        ModelError: it is no byte-level BPE, or splits words in a way that GGUF has no name for.
    """
    content = json.loads(tokenizer)
    model = content["model"]
    words = _words(content.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or model.get("byte_fallback") or words is None:
        raise ModelError(
            "the tokenizer is no byte-level BPE that splits words as GPT-2, Llama 3 or Qwen 2 do, "
            "and others are not written to GGUF; export the run as a folder (`--to hf:DIR`)"
        )
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [_UNUSED] * size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, _NORMAL
    for added in content.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = (each if isinstance(each, str) else " ".join(each) for each in model["merges"])
    return GgufVocabulary(
        tokens=tuple(tokens), types=tuple(types), merges=tuple(merges), words=words
    )


def _words(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The name of what splits a text into words; None if it has none."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        pattern: str = parts[0]["pattern"].get("Regex", "")
        return _SPLITS.get(pattern)
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    return None
