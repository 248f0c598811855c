"""Examples of one shape, each with its target: images, numbers, texts with a class, token ids."""

from windlass.data.examples.example_dataset import ExampleBatches, ExampleDataset, load_examples
from windlass.data.examples.made_examples import is_numbers, make_examples
from windlass.data.targets import (
    IGNORED_TARGET, ExampleArray, target_counts, weight_bits, with_one_target,
)  # fmt: skip

__all__ = [
    "IGNORED_TARGET", "ExampleArray", "ExampleBatches", "ExampleDataset", "is_numbers",
    "load_examples", "make_examples", "target_counts", "weight_bits", "with_one_target",
]  # fmt: skip
