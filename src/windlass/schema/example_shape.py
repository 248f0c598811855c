"""ExampleShape: what a model takes and predicts whose examples are not rows of tokens."""

from math import prod
from typing import Literal

from windlass.document import Document

ExampleUnit = Literal["images", "examples"]

_CLASS_BYTES = 8
"""A class is an integer of 64 bits, as a token is."""


class ExampleShape(Document):
    """An image or another array of numbers, and what is predicted of it: a class, or numbers."""

    inputs: tuple[int, ...]
    """Shape of one input, such as `[3, 224, 224]`: channels, height, width."""
    numbers: int | None = None
    """Numbers that are predicted of an example; None predicts one class of the vocabulary."""
    positions: int = 1
    """Positions of an example that attention mixes, as patches of an image; 1 without attention.
    They stand where a text has tokens: `batch.sequence`."""

    @property
    def noun(self) -> ExampleUnit:
        """What an example is called in words, in the plural."""
        return "images" if len(self.inputs) == 3 else "examples"

    def batch_bytes(self, itemsize: int) -> int:
        """Bytes of the input and the target of one example."""
        targets = _CLASS_BYTES if self.numbers is None else self.numbers * itemsize
        return prod(self.inputs) * itemsize + targets
