"""Text that tests make for themselves."""

import random


def words(count: int, seed: int) -> str:
    """Lines of made-up words, with letters of one to four bytes."""
    draw = random.Random(seed)
    syllables = ["ka", "to", "mi", "lé", "wörd", "ßu", "日本", "🙂", "the", "of", "12", "_x"]
    lines = [
        " ".join("".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(8))
        for _ in range(max(1, count // 8))
    ]
    return "\n".join(lines) + "\n"
