"""How likely a trained model finds given texts: the sum of the logarithms of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.models import in_loss_precision
from windlass.runtime.inference.inference_model import InferenceModel

_BATCH_TOKENS = 4096
"""Tokens that pass through the model at once, padding included."""
_PADDING = 0
"""Stands behind shorter rows, where no token of theirs can see it."""


def log_likelihoods(
    model: InferenceModel, choices: Sequence[EncodedChoice]
) -> list[ChoiceLikelihood]:
    """`sum_t log p(choice_t | context, choice_<t)` of each choice, in nats.

    A context that is too long for the model is cut to its last tokens.

    Args:
        model: the model, which predicts the next token; likelihoods are summed in float64.
        choices: at least one token each, and one before it.

    Raises:
        ValueError: a choice or its context has no token, or a choice has more than the model
            accepts.
    """
    rows = [_row(choice, model.max_sequence) for choice in choices]
    found = [ChoiceLikelihood(0.0, is_greedy=True)] * len(rows)
    batches = _batches([len(row) - 1 for row in rows])
    all_logits = model.logits_of_batches(_inputs(rows, batch) for batch in batches)
    for batch, logits in zip(batches, all_logits, strict=True):
        for place, index in enumerate(batch):
            end, count = len(rows[index]) - 1, len(choices[index].tokens)
            found[index] = _likelihood(logits[place, end - count : end], choices[index].tokens)
    return found


def _likelihood(logits: Tensor, tokens: Sequence[int]) -> ChoiceLikelihood:
    """The log-likelihood of tokens under the logits `Float[t v]` that predict them."""
    all_tokens = log_softmax(in_loss_precision(logits), dim=-1).cpu()
    chosen = torch.tensor(tokens)
    nats = all_tokens.gather(-1, chosen.unsqueeze(-1)).double().sum()
    return ChoiceLikelihood(float(nats), bool((all_tokens.argmax(-1) == chosen).all()))


def _inputs(rows: Sequence[Sequence[int]], batch: Sequence[int]) -> Tensor:
    """What the model reads of some rows, all but their last tokens, `Int[b s]`."""
    longest = max(len(rows[index]) for index in batch)
    padded = [[*rows[index], *[_PADDING] * (longest - len(rows[index]))] for index in batch]
    return torch.tensor(padded)[:, :-1]


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
