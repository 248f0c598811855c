"""`windlass sample`: text from a run's newest checkpoint, shown as it is written."""

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
    """Let a trained model write on after a prompt.

    Args:
        run: folder, name, beginning of its id, or `last`.
        prompt: what the text begins with.
        tokens: how many to write.
        temperature: 0 always takes the likeliest token; 1 draws as the model says.
        top_k: draws from the likeliest so many.
        seed: the same seed writes the same text.
        runs: where run folders lie.
    """
    sys.stdout.write(prompt)
    for piece in api.sample(
        run, prompt, root=runs, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
