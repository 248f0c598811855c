"""Which tokens have a meaning of their own, by the files beside a `tokenizer.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.document import read_json_object
from windlass.errors import DataError
from windlass.schema import SPECIAL_TOKENS_FILE

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKEN_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
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
    return tokens


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


def added_tokens(folder: Path) -> dict[int, Mapping[str, Any]]:
    """The tokens that `tokenizer_config.json` adds, by id (`Any`: each is a table of JSON).

    Raises:
        DataError: the file is no JSON object.
    """
    table = tokenizer_config(folder).get("added_tokens_decoder")
    entries = table.items() if isinstance(table, dict) else ()
    return {
        int(number): token
        for number, token in sorted(entries, key=lambda entry: int(entry[0]))
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    }


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; empty without the file (`Any`: any JSON).

    Raises:
        DataError: the file is no JSON object.
    """
    return _beside(folder / TOKENIZER_CONFIG_FILE)


def _beside(path: Path) -> dict[str, Any]:
    return read_json_object(path, DataError) if path.is_file() else {}
