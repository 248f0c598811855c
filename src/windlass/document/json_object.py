"""Reads JSON files that others write, such as those of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from windlass.atomic_files import read_regular_file
from windlass.errors import WindlassError


def read_json_object(path: Path, fault: type[WindlassError]) -> dict[str, Any]:
    """The object in a JSON file; `Any` because it is not validated yet.

    Args:
        fault: what is raised.

    Raises:
        WindlassError: it cannot be read, is no JSON object, or has a key twice.
    """
    try:
        content = json.loads(read_regular_file(path), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise fault(f"`{path}` cannot be read: {(error.strerror or '').lower()}") from None
    except (ValueError, RecursionError) as error:
        raise fault(f"`{path}` is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise fault(f"`{path}` holds a JSON {type(content).__name__}, not an object")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, whose keys must differ.

    Raises:
        ValueError: a key stands there twice.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key `{next(n for n in names if names.count(n) > 1)}` stands there twice")
    return table
