"""Vectors that are learned for each position of a sequence."""

from torch import Tensor

from windlass.models.context_parallel import at_positions
from windlass.models.packing import positions_in_documents


def learned_positions(
    table: Tensor, count: int, firsts: tuple[int, ...], documents: Tensor | None
) -> Tensor:
    """The vector of each token's position, `[s d]`; with documents `[b s d]`.

    Args:
        table: a row for each position.
        firsts: position of the first token of each run.
        documents: the document of each token of a whole row, in which positions begin at 0; None
            means that a row is one document.
    """
    if documents is None:
        return at_positions(table, count, firsts)
    return table[at_positions(positions_in_documents(documents), count, firsts, dim=1)]
