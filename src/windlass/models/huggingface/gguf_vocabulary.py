"""A `tokenizer.json`, and what stands beside it, as the vocabulary of a GGUF file.

What readers ask for beyond https://github.com/ggml-org/ggml/blob/master/docs/gguf.md is that of
llama.cpp: merges, no token twice, and a word for each way to split a text.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from windlass.errors import ModelError, shorten
from windlass.models.huggingface.model_folder import CONFIG_FILE, TOKENIZER_FILE

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Types of tokens. Source: `gguf.TokenType`."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    (rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}", True): "llama-bpe",
    (rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}", False): "smaug-bpe",
    (rf"{_LETTERS}\p{{N}}{_REST}", False): "qwen2",
}
"""Names that llama.cpp gives to patterns that split a text into words, each with whether a word
that is a token is one whatever its merges say."""
_NO_MERGE = "[NONE] [NONE]"
"""A merge that no text has: readers refuse a file without any. Merges begin with characters."""
_TOKENIZER_CONFIG, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokens of a byte-level BPE."""

    tokens: tuple[str, ...]
    """Token of each id, as many as the model has."""
    types: tuple[int, ...]
    merges: tuple[str, ...]
    words: str
    """How a text is split into words, by llama.cpp's name."""
    settings: Mapping[str, int | bool | str]
    """Ids of the first and the last token of a text, whether a prompt gets them, and the chat
    template, as far as known, by their names in the package `gguf`."""


def gguf_vocabulary(files: Mapping[str, bytes], size: int) -> GgufVocabulary | None:
    """The vocabulary of a tokenizer; None without one.

    Args:
        files: content of the small files of a model's folder, by name.
        size: entries of the model's vocabulary; those beyond the tokenizer's are unused.

    Raises:
        ModelError: it is no byte-level BPE, splits words in a way that GGUF has no name for, or has
            other ids than the model.
    """
    if TOKENIZER_FILE not in files:
        return None
    content = _object(files, TOKENIZER_FILE)
    model = content.get("model") or {}
    words = None if _normalizes(content.get("normalizer")) else _words(model, content)
    if words is None:
        raise ModelError(
            "the tokenizer is no byte-level BPE that splits words as GPT-2, Llama 3 or Qwen 2 do, "
            "and others are not written to GGUF; export the run as a folder (`--to hf:DIR`)"
        )
    added = content.get("added_tokens") or ()
    ids = {**model["vocab"], **{each["content"]: each["id"] for each in added}}
    tokens, types = [f"[PAD{index}]" for index in range(size)], [_UNUSED] * size
    named = ((token, index, _NORMAL) for token, index in model["vocab"].items())
    for token, index, kind in chain(named, ((a["content"], a["id"], _type(a)) for a in added)):
        if not 0 <= index < size:
            raise ModelError(
                f"the tokenizer has `{shorten(token)}` as id {index}, and the model has {size} "
                "entries; export the run as a folder (`--to hf:DIR`)"
            )
        tokens[index], types[index] = token, kind
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise ModelError(
            f"the tokenizer has `{shorten(token)}` under {count} ids, which no GGUF file may; "
            "export the run as a folder (`--to hf:DIR`)"
        )
    merges = (each if isinstance(each, str) else " ".join(each) for each in model["merges"])
    return GgufVocabulary(
        tokens=tuple(tokens), types=tuple(types), merges=tuple(merges) or (_NO_MERGE,),
        words=words, settings=_settings(files, content, ids),
    )  # fmt: skip


def _type(added: Mapping[str, Any]) -> int:
    """The type of an added token; one in such marks steers a model, whatever it is said to be."""
    text = added["content"]
    is_mark = text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
    return _CONTROL if added.get("special") or is_mark else _USER_DEFINED


def _normalizes(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether texts are changed before they are split, but for how letters are composed.

    Readers of GGUF files compose none; almost all texts are so already.
    """
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    return any(part.get("type") != "NFC" for part in parts)


def _words(model: Mapping[str, Any], content: Mapping[str, Any]) -> str | None:
    """The name of what splits a text into words; None if it has none, or for another model."""
    others = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(name) for name in others):
        return None
    pre_tokenizer = content.get("pre_tokenizer") or {}
    first, *more = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    last = more[-1] if more else first
    kinds = [part.get("type") for part in (first, *more)]
    if kinds[-1] != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    takes_whole = bool(model.get("ignore_merges"))
    if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        is_plain = first.get("behavior") == "Isolated" and not first.get("invert")
        return _SPLITS.get((first["pattern"].get("Regex"), takes_whole)) if is_plain else None
    if takes_whole or not last.get("use_regex", True):
        return None
    has_digits = kinds == ["Digits", "ByteLevel"] and first.get("individual_digits")
    return "smollm" if has_digits else "gpt-2" if not more else None


def _settings(
    files: Mapping[str, bytes], tokenizer: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, int | bool | str]:
    """Further keys of the vocabulary; `tokenizer_config.json` names the token that ends an answer.

    Whether a prompt gets a first and a last token is written in any case: readers guess it from how
    words are split.
    """
    config, beside = _object(files, CONFIG_FILE), _object(files, _TOKENIZER_CONFIG)
    settings: dict[str, int | bool | str] = {}
    for kind, added in zip(("bos", "eos"), _ends_of_prompts(tokenizer), strict=True):
        adds = beside.get(f"add_{kind}_token")
        adds = adds if isinstance(adds, bool) else added is not None
        token = beside.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index: object = ids.get(str(added if adds and added else token or ""))
        if index is None:
            several = config.get(f"{kind}_token_id")
            index = several[0] if isinstance(several, list) and several else several
        if is_known := isinstance(index, int):
            settings[f"{kind}_token_id"] = index
        settings[f"add_{kind}_token"] = adds and is_known
    if template := _chat_template(files, beside):
        settings["chat_template"] = template
    return settings


def _ends_of_prompts(tokenizer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that a tokenizer puts before a text and behind it."""
    after = tokenizer.get("post_processor") or {}
    for part in after.get("processors", [after]):
        if part.get("type") == "TemplateProcessing" and part.get("single"):
            first, last = (part["single"][place].get("SpecialToken", {}) for place in (0, -1))
            return first.get("id"), last.get("id")
    return None, None


def _chat_template(files: Mapping[str, bytes], beside: Mapping[str, Any]) -> str | None:
    if _TEMPLATE_FILE in files:
        return files[_TEMPLATE_FILE].decode(errors="replace")
    template = beside.get("chat_template")
    for each in template if isinstance(template, list) else ():
        if isinstance(each, dict) and each.get("name") == "default":
            template = each.get("template")
    return template if isinstance(template, str) else None


def _object(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    """The content of a JSON file, or an empty table."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"`{name}` of the model's folder is no JSON: {error}") from None
    return content if isinstance(content, dict) else {}
