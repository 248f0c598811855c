"""Rows of sentence pairs: what follows, what is exchanged, and what is a target."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from made_text import prepare

from windlass.data import (
    MlmMasking,
    PairTokens,
    RowBatches,
    TokenDataset,
    sentence_pair_batches,
)
from windlass.data.examples import IGNORED_TARGET
from windlass.errors import InputErrors
from windlass.schema import SENTENCES_PER_ROW

SEQUENCE, FIRST, MASK, VOCABULARY = 40, 298, 299, 300
MASKING = MlmMasking(mask_token=MASK, vocabulary=256, ignore_index=IGNORED_TARGET)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Texts of 5 to 120 letters with bytes as tokens; each has an alphabet of three of its own."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    path = folder / "texts.jsonl"
    alphabets = [[chr(48 + 3 * i + letter) for letter in range(3)] for i in range(26)]
    texts = ["".join(draw.choices(alphabet, k=draw.randint(5, 240))) for alphabet in alphabets]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return prepare(str(path), cache=folder / "cache", tokenizer="byte", held_out=0.2)


def make(tokens: TokenDataset, *, batch: int = 1, packing: bool = False) -> RowBatches:
    return sentence_pair_batches(
        tokens, sequence=SEQUENCE, batch=batch, seed=3, masking=MASKING, packing=packing,
        special=PairTokens(first=FIRST, separator=256, second_offset=VOCABULARY),
    )  # fmt: skip


def unpacked(batches: RowBatches, steps: range) -> list[tuple[list[int], list[int], int, int]]:
    """Both sentences, unmasked, of every pair, what is said of it, and its number of targets."""
    found = []
    for step in steps:
        (inputs,), (targets,) = batches.samples(step)
        (ids,) = batches.document_ids(step, 0, 1)
        learned, said = targets[:SEQUENCE], targets[SEQUENCE:]
        segments, text = np.divmod(inputs, VOCABULARY)
        text = np.where(learned == IGNORED_TARGET, text, learned)
        known = said[said != IGNORED_TARGET]
        for place, sentence in enumerate(known):
            row, part = text[ids == place], segments[ids == place]
            one, two = row[part == 0], row[part == 1]
            assert (one[0], one[-1], two[-1]) == (FIRST, 256, 256)
            count = int((learned[ids == place] != IGNORED_TARGET).sum())
            found.append((one[1:-1].tolist(), two[:-1].tolist(), int(sentence), count))
        assert not (ids > len(known)).any()
        assert (learned[ids == len(known)] == IGNORED_TARGET).all()
    return found


def test_half_of_all_pairs_follow_in_their_document_and_the_others_are_of_another(
    tokens: TokenDataset,
) -> None:
    documents = [
        "".join(map(chr, text)) for text in np.split(tokens.train, tokens.documents.starts)
    ]
    pairs = unpacked(make(tokens), range(1, 300))
    for one, two, sentence, count in pairs:
        first, second = "".join(map(chr, one)), "".join(map(chr, two))
        follows = any(first + second in document for document in documents)
        assert follows == (sentence == 0)
        assert sentence == 0 or set(first).isdisjoint(second)
        assert count == max(1, round(0.15 * len(one + two)))
    # The standard deviation of 299 tosses is 2.9 %.
    assert np.mean([pair[2] for pair in pairs]) == pytest.approx(0.5, abs=0.12)


def test_packed_rows_hold_each_piece_once_and_at_most_three(tokens: TokenDataset) -> None:
    batches = make(tokens, packing=True)
    rows = len(batches.order.train[0])
    held = [len(batches.document_names(step, 0)) for step in range(1, rows + 1)]
    pairs = unpacked(batches, range(1, rows + 1))
    assert max(held) <= SENTENCES_PER_ROW
    assert sum(held) == len(pairs) == len(make(tokens).order.train[0])
    assert batches.packing_factor == len(pairs) / rows > 1.05
    counts = [batches.target_counts(step)[0].tolist() for step in range(1, rows + 1)]
    assert np.sum(counts, axis=0).tolist() == [sum(pair[3] for pair in pairs), len(pairs)]


def test_micro_batches_have_the_pairs_of_the_batch_and_epochs_draw_anew(
    tokens: TokenDataset,
) -> None:
    batches = make(tokens, batch=6, packing=True)
    parts = [batches.samples(3, first, 2) for first in (0, 2, 4)]
    for index, whole in enumerate(batches.samples(3)):
        assert np.array_equal(whole, np.concatenate([part[index] for part in parts]))
    single = make(tokens)
    rows = len(single.order.train[0])
    epochs = [
        {single.document_names(step, 0): single.samples(step)[0].tobytes() for step in steps}
        for steps in (range(1, rows + 1), range(rows + 1, 2 * rows + 1))
    ]
    assert sum(epochs[0][name] == epochs[1][name] for name in epochs[0]) < rows / 10


def test_bits_per_byte_count_the_bytes_of_masked_tokens_alone(tokens: TokenDataset) -> None:
    batches = make(tokens)
    learned = np.concatenate([row[:, :SEQUENCE].ravel() for _, row in batches.held_out_batches(99)])
    learned = learned[learned != IGNORED_TARGET]
    assert batches.bits_per_byte(1.0, 99) == pytest.approx(1 / np.log(2), rel=1e-12)
    assert len(learned) > 30
    assert (learned < 256).all()


def test_a_text_without_a_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "xyz"}\n', encoding="utf-8")
    short = prepare(str(path), cache=tmp_path / "cache", tokenizer="byte", held_out=0.5)
    with pytest.raises(InputErrors, match=r"pair of sentences within 4 tokens.*train\.sequence"):
        sentence_pair_batches(
            short, sequence=4, batch=1, seed=0, masking=MASKING,
            special=PairTokens(first=FIRST, separator=256, second_offset=VOCABULARY),
        )  # fmt: skip
