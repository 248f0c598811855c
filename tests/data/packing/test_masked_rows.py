"""Packed rows of masked text: what a batch holds, and what is a target."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from made_text import prepare

from windlass.data import MlmMasking, RowBatches, TokenDataset, masked_batches
from windlass.data.examples import IGNORED_TARGET
from windlass.errors import InputErrors

SEQUENCE = 48
MASK = 299
MASKING = MlmMasking(mask_token=MASK, vocabulary=257, ignore_index=IGNORED_TARGET)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Texts of 1 to 100 letters, of which each starts with its number, with bytes as tokens."""
    folder, draw = tmp_path_factory.mktemp("masked"), random.Random(0)
    path = folder / "texts.jsonl"
    texts = [f"{i:03}" + "".join(draw.choices("abc ", k=draw.randint(1, 97))) for i in range(90)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return prepare(str(path), cache=folder / "cache", tokenizer="byte", held_out=0.2)


def make(tokens: TokenDataset, batch: int = 1) -> RowBatches:
    return masked_batches(tokens, sequence=SEQUENCE, batch=batch, seed=3, masking=MASKING)


def epoch_rows(batches: RowBatches) -> int:
    """Rows of an epoch, read from the sentence that is printed."""
    return int(batches.notes[0].split(" rows")[0].split()[-1].replace(",", ""))


def test_an_epoch_has_each_token_once_in_a_piece_of_its_own(tokens: TokenDataset) -> None:
    batches, pieces = make(tokens), []
    for step in range(1, epoch_rows(batches) + 1):
        (inputs,), (targets,) = batches.samples(step)
        (ids,) = batches.document_ids(step, 0, 1)
        text = np.where(targets == IGNORED_TARGET, inputs, targets)
        named = batches.document_names(step, 0)
        pieces += [(name, text[ids == place].tolist()) for place, name in enumerate(named)]

    starts, documents = tokens.documents.starts, {}
    for index in range(len(tokens.documents)):
        whole = tokens.train[starts[index] : starts[index + 1]].tolist()
        cut = [whole[at : at + SEQUENCE] for at in range(0, len(whole), SEQUENCE)]
        documents[tokens.documents.name(index)] = [piece for piece in cut if len(piece) > 1]
    expected = [(name, piece) for name, cut in documents.items() for piece in cut]
    assert sorted(pieces) == sorted(expected)
    assert batches.packing_factor == len(expected) / epoch_rows(batches) > 1


def test_each_piece_has_its_share_of_targets_and_fill_has_none(tokens: TokenDataset) -> None:
    batches = make(tokens, batch=8)
    inputs, targets = batches.samples(1)
    ids = batches.document_ids(1, 0, 8)
    for sample, (row, places) in enumerate(zip(targets, ids, strict=True)):
        learned = row != IGNORED_TARGET
        held = len(batches.document_names(1, sample))
        for piece in range(held):
            length = int((places == piece).sum())
            assert learned[places == piece].sum() == max(1, round(0.15 * length))
        assert not learned[places == held].any()
    assert (targets != IGNORED_TARGET).sum(axis=1).tolist() == batches.target_counts(1).tolist()
    hidden = inputs[targets != IGNORED_TARGET] == MASK
    assert hidden.mean() == pytest.approx(0.8, abs=0.2)


def test_micro_batches_have_the_samples_of_the_batch(tokens: TokenDataset) -> None:
    batches = make(tokens, batch=6)
    parts = [batches.samples(3, first, 2) for first in (0, 2, 4)]
    for index, whole in enumerate(batches.samples(3)):
        assert np.array_equal(whole, np.concatenate([part[index] for part in parts]))


def test_the_next_epoch_has_the_same_rows_with_other_masks(tokens: TokenDataset) -> None:
    batches = make(tokens)
    rows = epoch_rows(batches)
    epochs = [
        {batches.document_names(step, 0): batches.samples(step)[1].tobytes() for step in steps}
        for steps in (range(1, rows + 1), range(rows + 1, 2 * rows + 1))
    ]
    assert epochs[0].keys() == epochs[1].keys()
    assert list(epochs[0]) != list(epochs[1])
    assert sum(epochs[0][row] == epochs[1][row] for row in epochs[0]) < rows / 2


def test_bits_per_byte_count_the_bytes_of_masked_tokens(tokens: TokenDataset) -> None:
    batches = make(tokens)
    held_out = [targets for _, targets in batches.held_out_batches(99)]
    learned = np.concatenate([row[row != IGNORED_TARGET] for row in held_out])
    nbytes = int((learned != tokens.meta.end_of_text).sum())
    expected = len(learned) / np.log(2) / nbytes
    assert batches.bits_per_byte(1.0, 99) == pytest.approx(expected, rel=1e-12)
    (first, *_), (again, *_) = (list(make(tokens).held_out_batches(5)) for _ in range(2))
    assert np.array_equal(first, again)


def test_a_text_without_two_tokens_in_a_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "xyz"}\n', encoding="utf-8")
    short = prepare(str(path), cache=tmp_path / "cache", tokenizer="byte", held_out=0.5)
    with pytest.raises(InputErrors, match=r"has two tokens; raise `train\.sequence`"):
        masked_batches(short, sequence=1, batch=1, seed=0, masking=MASKING)
