"""How likely a trained model finds given texts: the sum of the logarithms of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from windlass.data import EncodedChoice
from windlass.models import LayerStack
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.inference.generate import checkpoint_logits
from windlass.schema import Precision

_BATCH_TOKENS = 4096
"""Tokens that pass through the model at once, padding included."""
_PADDING = 0
"""Stands behind shorter rows, where no token of theirs can see it."""


def log_likelihoods(
    stack: LayerStack,
    checkpoint: Checkpoint,
    choices: Sequence[EncodedChoice],
    *,
    precision: Precision = "float32",
    device: str = "cpu",
) -> list[float]:
    """`sum_t log p(choice_t | context, choice_<t)` of each choice, in nats.

    A context that is too long for the model is cut to its last tokens.

    Args:
        stack: the model that the checkpoint belongs to; it predicts the next token.
        checkpoint: checkpoint to load the weights from.
        choices: at least one token each, and one before it.
        precision: precision that layers compute in; likelihoods are summed in float64.
        device: torch device name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
        ValueError: a choice or its context has no token, or a choice has more than the model
            accepts.
    """
    rows = [_row(choice, stack.max_sequence) for choice in choices]
    logits_of = checkpoint_logits(stack, checkpoint, precision=precision, device=device)
    sums = [0.0] * len(rows)
    for batch in _batches([len(row) - 1 for row in rows]):
        longest = max(len(rows[index]) for index in batch)
        padded = [rows[index] + [_PADDING] * (longest - len(rows[index])) for index in batch]
        tokens = torch.tensor(padded)
        logits = logits_of(tokens[:, :-1])
        for place, index in enumerate(batch):
            end, count = len(rows[index]) - 1, len(choices[index].tokens)
            sums[index] = _sum(logits[place, end - count : end], choices[index].tokens)
    return sums


def _sum(logits: Tensor, tokens: Sequence[int]) -> float:
    """The log-likelihood of tokens under the logits `Float[t v]` that predict them."""
    chosen = log_softmax(logits.float(), dim=-1).cpu()
    return float(chosen[range(len(tokens)), list(tokens)].double().sum())


def _row(choice: EncodedChoice, longest: int | None) -> list[int]:
    """Context and choice, with at most one token more than the model reads."""
    context, tokens = choice
    if not context or not tokens:
        raise ValueError("a choice and its context have at least one token each")
    if longest is not None and len(tokens) > longest:
        raise ValueError(f"a choice has {len(tokens)} tokens, and the model accepts {longest}")
    row = [*context, *tokens]
    return row if longest is None else row[-(longest + 1) :]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of rows in batches of similar length, so that little is padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches
