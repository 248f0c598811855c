"""Examples made of what a caller passes, and their batches."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from windlass.data.examples import ExampleBatches, load_examples, make_examples
from windlass.errors import DataError

PAIRS = [(np.arange(i, i + 4), np.arange(i + 1, i + 5)) for i in range(20)]


def test_token_ids_are_cut_into_windows_whose_targets_are_the_next_tokens() -> None:
    examples = make_examples(range(10), sequence=3, held_out=0.1)

    assert examples.inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert examples.targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert examples.held_out == 1


def test_each_epoch_takes_every_training_example_once_and_none_that_is_held_out() -> None:
    batches = ExampleBatches(make_examples(PAIRS, sequence=None, held_out=0.2), batch=4, seed=3)
    epochs = [
        [row for step in range(4 * e + 1, 4 * e + 5) for row in batches.samples(step)[0][:, 0]]
        for e in range(2)
    ]

    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1]
    held_out = [row for inputs, _ in batches.held_out_batches(9, 3) for row in inputs[:, 0]]
    assert held_out == [16, 17, 18, 19]


def test_micro_batches_share_the_samples_of_a_step() -> None:
    batches = ExampleBatches(make_examples(PAIRS, sequence=None, held_out=0.2), batch=4, seed=3)

    parts = np.concatenate([batches.samples(2, first, 2)[0] for first in (0, 2)])

    assert np.array_equal(parts, batches.samples(2)[0])


def test_examples_are_read_as_they_were_written(tmp_path: Path) -> None:
    examples = make_examples(PAIRS, sequence=None, held_out=0.2)

    examples.save(tmp_path / "examples.safetensors")

    again = load_examples(tmp_path / "examples.safetensors")
    assert again is not None
    assert again.fingerprint == examples.fingerprint
    assert load_examples(tmp_path / "none") is None


def test_of_data_without_an_end_as_many_items_are_taken_as_are_asked_for() -> None:
    endless = (PAIRS[index % 20] for index in count())

    assert len(make_examples(endless, sequence=None, held_out=0.1, most=30).inputs) == 30


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "have no item"),
        ([0.5, 1.5], "token ids are integers"),
        ([PAIRS[0], (np.arange(3), np.arange(3))], "item 1 of the data has"),
        ([PAIRS[0], 7], "item 1 of the data is no pair"),
        (range(4), "make 1 examples"),
        ([-1, 2, 3, 4, 5, 6, 7, 8, 9], "below 0"),
    ],
)
def test_data_of_another_form_are_refused(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_examples(data, sequence=3, held_out=0.1)  # type: ignore[arg-type]
