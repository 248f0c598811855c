"""`windlass sample`: text generated from a run's newest checkpoint, shown as it is written."""

import sys
from pathlib import Path

from windlass import api


def sample(
    run: str = "last",
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    runs: Path = api.RUNS,
) -> None:
    """Let a trained model continue a prompt.

    For example: `windlass sample last --prompt 'def ' --tokens 100`.

    Args:
        run: Folder, name, the first characters of its id, or `last`.
        prompt: The beginning of the text.
        tokens: Number of tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples the model's distribution.
        top_k: Sample only from this many of the likeliest tokens.
        seed: The same seed generates the same text.
        runs: The folder that holds the run folders.
    """
    sys.stdout.write(prompt)
    for piece in api.sample(
        run, prompt, root=runs, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
