"""Masked language modelling: which tokens of a sequence are masked, and with what."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.data.keyed_choices.permutation import keyed_number, keyed_permutation

TokenRow = npt.NDArray[np.int64]
"""Token ids `Int[s]` of one sequence."""

_TARGET_SHARE = 0.15
"""Share of a sequence's tokens that are targets."""
_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1
"""Shares of the targets that become the mask token and a random token; the rest are unchanged.
Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmMasking:
    """Masks the same number of tokens in every sequence, at positions that follow from a key.

    So a mean over sequences is a mean over tokens.
    """

    mask_token: int
    """Id of the mask token, which is not one of the tokenizer's."""
    vocabulary: int
    """Number of the tokenizer's entries, from which random tokens are drawn."""
    ignore_index: int
    """Target of a token that is not predicted."""

    def target_counts(self, lengths: TokenRow) -> TokenRow:
        """Number of targets of sequences of such lengths; at least one each."""
        counts: TokenRow = np.rint(_TARGET_SHARE * lengths).astype(np.int64)
        return counts.clip(min=1)

    def masked_positions(self, length: int, *key: int) -> TokenRow:
        """Unordered positions of the targets in a sequence of `length` tokens; at least one."""
        count = int(self.target_counts(np.array(length)))
        return keyed_permutation(length, *key)(np.arange(count, dtype=np.int64))

    def mask(self, row: TokenRow, *key: int) -> tuple[TokenRow, TokenRow]:
        """A sequence with masked tokens, and its targets `Int[s]`."""
        positions = self.masked_positions(len(row), *key)
        inputs, targets = row.copy(), np.full_like(row, self.ignore_index)
        targets[positions] = row[positions]
        masked = round(_MASKED_SHARE * len(positions))
        randomized = round(_RANDOM_SHARE * len(positions))
        inputs[positions[:masked]] = self.mask_token
        for position in positions[masked : masked + randomized].tolist():
            inputs[position] = keyed_number(self.vocabulary, *key, position)
        return inputs, targets
