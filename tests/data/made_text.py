"""Text that tests make for themselves."""

import random
from collections.abc import Callable
from pathlib import Path

from windlass.data import TokenDataset, prepare_dataset
from windlass.schema import DataRequest


def prepare(
    source: str | tuple[str, ...],
    *,
    cache: Path,
    progress: Callable[[str, int, int | None], None] | None = None,
    **settings: object,
) -> TokenDataset:
    """Prepares the tokens of sources with the given settings of a request."""
    data = DataRequest.model_validate({"source": source, **settings})
    return prepare_dataset(data, cache=cache, progress=progress)


def words(count: int, seed: int) -> str:
    """Lines of made-up words, with letters of one to four bytes."""
    draw = random.Random(seed)
    syllables = ["ka", "to", "mi", "lé", "wörd", "ßu", "日本", "🙂", "the", "of", "12", "_x"]
    lines = [
        " ".join("".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(8))
        for _ in range(max(1, count // 8))
    ]
    return "\n".join(lines) + "\n"
