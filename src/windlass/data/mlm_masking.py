"""Masking: which tokens of a sequence are hidden from a model that is to predict them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.data.permutation import keyed_number, keyed_permutation

Row = npt.NDArray[np.int64]

_SHARE = 0.15
_HIDDEN, _REPLACED = 0.8, 0.1
"""Of the tokens to predict, those that are hidden and those that another takes the place of; the
rest stay as they are. Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Hides tokens, of every sequence as many, so that means over sequences are means over tokens.

    What is hidden is a function of the key alone.
    """

    hidden: int
    """The token that stands for a hidden one; none of the tokenizer's."""
    vocabulary: int
    """The tokenizer's entries, from which replacements are drawn."""
    ignored: int
    """The target of a token that is not to be predicted."""

    def places(self, length: int, *key: int) -> Row:
        """The places to predict in a sequence of so many tokens, in no order; at least one."""
        count = max(1, round(_SHARE * length))
        return keyed_permutation(length, *key)(np.arange(count, dtype=np.int64))

    def hide(self, row: Row, *key: int) -> tuple[Row, Row]:
        """A sequence with tokens hidden, and the targets `Int[s]`."""
        places = self.places(len(row), *key)
        inputs, targets = row.copy(), np.full_like(row, self.ignored)
        targets[places] = row[places]
        hidden = round(_HIDDEN * len(places))
        replaced = round(_REPLACED * len(places))
        inputs[places[:hidden]] = self.hidden
        for place in places[hidden : hidden + replaced].tolist():
            inputs[place] = keyed_number(self.vocabulary, *key, place)
        return inputs, targets
