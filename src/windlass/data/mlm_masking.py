"""Masking: which tokens of a sequence are hidden from a model that is to predict them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.data.permutation import keyed_number, keyed_permutation

TokenRow = npt.NDArray[np.int64]

_SHARE = 0.15
_HIDDEN, _REPLACED = 0.8, 0.1
"""Of the tokens to predict, those that are hidden and those that another takes the place of; the
rest stay as they are. Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmMasking:
    """Hides tokens, of every sequence as many, so that means over sequences are means over tokens.

    What is hidden is a function of the key alone.
    """

    mask_token: int
    """The token that stands for a hidden one; none of the tokenizer's."""
    vocabulary: int
    """The tokenizer's entries, from which replacements are drawn."""
    ignore_index: int
    """The target of a token that is not to be predicted."""

    def masked_positions(self, length: int, *key: int) -> TokenRow:
        """The places to predict in a sequence of so many tokens, in no order; at least one."""
        count = max(1, round(_SHARE * length))
        return keyed_permutation(length, *key)(np.arange(count, dtype=np.int64))

    def mask(self, row: TokenRow, *key: int) -> tuple[TokenRow, TokenRow]:
        """A sequence with tokens hidden, and the targets `Int[s]`."""
        places = self.masked_positions(len(row), *key)
        inputs, targets = row.copy(), np.full_like(row, self.ignore_index)
        targets[places] = row[places]
        hidden = round(_HIDDEN * len(places))
        replaced = round(_REPLACED * len(places))
        inputs[places[:hidden]] = self.mask_token
        for place in places[hidden : hidden + replaced].tolist():
            inputs[place] = keyed_number(self.vocabulary, *key, place)
        return inputs, targets
