"""What the folder of a tokenizer says: its special tokens, and a vocabulary in another form."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from windlass.atomic_files import atomic_folder, file_state, read_regular_file, storage_errors
from windlass.document import read_json_object
from windlass.errors import DataError, shorten
from windlass.schema import SPECIAL_TOKENS_FILE, TOKENIZER_FILE

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKEN_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_VOCABULARIES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "merges.txt", "tekken.json",
)  # fmt: skip
_SETTINGS = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, "added_tokens.json", "config.json")
_TOKEN_FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
_ID_FILES = ("config.json", "generation_config.json")


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens of a folder by the names that transformers has, such as `bos_token`.

    Raises:
        DataError: a file is no JSON object.
    """
    tokens: dict[str, str] = {}
    for content in (_beside(folder / SPECIAL_TOKENS_FILE), tokenizer_config(folder)):
        for kind in SPECIAL_TOKEN_KINDS:
            value = content.get(f"{kind}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[f"{kind}_token"] = text
    return tokens or _usual_tokens(folder)


def _usual_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the model's type has where its folder names none, as BERT's."""
    if (
        "model_type" not in _beside(folder / _ID_FILES[0])
        or not (folder / TOKENIZER_FILE).is_file()
    ):
        return {}
    states = tuple(file_state(folder / name) for name in (_ID_FILES[0], TOKENIZER_FILE))
    return dict(_library_tokens(folder, states))


@lru_cache(maxsize=8)
def _library_tokens(folder: Path, states: tuple[object, ...]) -> dict[str, str]:
    """What transformers says; nothing without it."""
    del states  # what was read of other files is forgotten
    try:
        return _read(folder)[1]
    except DataError:
        return {}


def special_ids(folder: Path) -> dict[str, int]:
    """The ids that the model's own files give its special tokens, by names such as `bos_token`.

    Of several ends of a text the first counts, as for a tokenizer there is one alone.

    Raises:
        DataError: a file is no JSON object.
    """
    ids: dict[str, int] = {}
    for content in (_beside(folder / file) for file in reversed(_ID_FILES)):
        for kind in SPECIAL_TOKEN_KINDS:
            value = content.get(f"{kind}_token_id")
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int) and first >= 0:
                ids[f"{kind}_token"] = first
    return ids


def add_named_tokens(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Adds the tokens that `tokenizer_config.json` adds by id, in place.

    Raises:
        DataError: one of them has another id.
    """
    for number, entry in _added_tokens(path.parent).items():
        text = entry["content"]
        if backend.token_to_id(text) is None:
            flags = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
            backend.add_tokens([tokenizers.AddedToken(text, **flags)])
        if backend.token_to_id(text) != number:
            raise DataError(
                f"`{shorten(text)}` is token {backend.token_to_id(text)} of `{path}`, and "
                f"`{TOKENIZER_CONFIG_FILE}` beside it says {number}; take both from one model"
            )


def ids_around_text(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer puts before and behind a text."""
    encoding = backend.encode("a")
    marks = encoding.special_tokens_mask
    if 0 not in marks:
        return (), ()
    before, behind = marks.index(0), marks[::-1].index(0)
    return tuple(encoding.ids[:before]), tuple(encoding.ids[len(marks) - behind :])


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; empty without the file (`Any`: any JSON).

    Raises:
        DataError: the file is no JSON object.
    """
    return _beside(folder / TOKENIZER_CONFIG_FILE)


def converted_tokenizer(folder: Path, cache: Path) -> Path | None:
    """The `tokenizer.json` that transformers makes of a folder without one, made once.

    Args:
        cache: folder of all that were made.

    Returns:
        None if the folder holds no tokenizer.

    Raises:
        DataError: transformers is missing, or cannot read it.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return None
    digest = hashlib.sha256()
    for name in (*_VOCABULARIES, *_SETTINGS):
        if (folder / name).is_file():
            digest.update(name.encode() + read_regular_file(folder / name))
    made = cache / digest.hexdigest()[:16]
    if not (made / TOKENIZER_FILE).is_file():
        text, special = _read(folder)
        with storage_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
        with atomic_folder(made, replaces=True) as temporary:
            (temporary / TOKENIZER_FILE).write_text(text, encoding="utf-8")
            (temporary / SPECIAL_TOKENS_FILE).write_text(json.dumps(special), encoding="utf-8")
    return made / TOKENIZER_FILE


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """A folder's tokenizer as JSON, and its special tokens by name."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(
            f"the tokenizer of `{folder}` is no `tokenizer.json`, and the package `transformers` "
            "converts it; install `windlass[hf]`"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        text = loaded.backend_tokenizer.to_str()
    except Exception as error:  # noqa: BLE001  transformers and its libraries raise anything
        raise DataError(
            f"transformers cannot read the tokenizer of `{folder}`: {shorten(str(error))}; put a "
            "`tokenizer.json` into it"
        ) from None
    return text, {name: str(token) for name, token in loaded.special_tokens_map.items()}


def _added_tokens(folder: Path) -> dict[int, Mapping[str, Any]]:
    """The tokens that `tokenizer_config.json` adds, by id (`Any`: each is a table of JSON)."""
    table = tokenizer_config(folder).get("added_tokens_decoder")
    entries = table.items() if isinstance(table, dict) else ()
    return {
        int(number): token
        for number, token in sorted(entries, key=lambda entry: int(entry[0]))
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    }


def _beside(path: Path) -> dict[str, Any]:
    return read_json_object(path, DataError) if path.is_file() else {}
