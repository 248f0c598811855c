import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from made_text import prepare, words

from windlass.data.batches import Batches
from windlass.data.keyed_choices import MlmMasking
from windlass.data.token_files import TokenDataset, open_dataset
from windlass.errors import DataError, InputErrors

MakeTokens = Callable[..., TokenDataset]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    root = tmp_path_factory.mktemp("made")
    for index in range(30):
        (root / f"{index:02}.txt").write_text(words(60, index), encoding="utf-8")
    return prepare(str(root), tokenizer="byte", held_out=0.3, cache=root / ".cache")


@given(sequence=st.integers(8, 300), batch=st.integers(5, 40), seed=st.integers(0, 2**63))
@settings(max_examples=20)
def test_an_epoch_has_each_token_once_except_fewer_than_a_sequence(
    made: TokenDataset, sequence: int, batch: int, seed: int
):
    batches = Batches(made, sequence=sequence, batch=batch, seed=seed)
    size, windows = len(made.train), batches.epoch_sequences[0]
    steps = range(1, 2 * windows // batch + 2)
    order = np.concatenate([batches._starts(step, 0, batch) for step in steps])
    for epoch in (order[:windows], order[windows : 2 * windows]):
        seen = np.bincount(((epoch[:, None] + np.arange(sequence)) % size).ravel(), minlength=size)
        assert seen.max() == 1
        assert (seen == 0).sum() == size % sequence


MASKING = MlmMasking(mask_token=999, vocabulary=257, ignore_index=-100)


@given(data=st.data(), step=st.integers(1, 10**9), masking=st.sampled_from([None, MASKING]))
@settings(max_examples=50)
def test_the_batch_of_a_step_is_the_same_however_it_is_split(
    made: TokenDataset, data: st.DataObject, step: int, masking: MlmMasking | None
):
    batches = Batches(made, sequence=33, batch=12, seed=5, masking=masking)
    whole = batches.samples(step)
    boundaries = sorted(data.draw(st.sets(st.integers(1, 11))))
    edges = [0, *boundaries, 12]
    parts = [batches.samples(step, first, end - first) for first, end in pairwise(edges)]
    for side in (0, 1):
        assert (np.concatenate([part[side] for part in parts]) == whole[side]).all()


def test_masked_tokens_are_the_targets_and_count_in_bits_per_byte(made: TokenDataset):
    plain = Batches(made, sequence=40, batch=4, seed=1)
    masked = replace(plain, masking=MASKING)
    (inputs, targets), (own, _) = (
        next(each.held_out_batches(3, rows=3)) for each in (masked, plain)
    )
    is_target = targets != MASKING.ignore_index
    assert (is_target.sum(1) == 6).all()
    assert (targets[is_target] == own[is_target]).all()
    assert (inputs[~is_target] == own[~is_target]).all()
    # With bytes, each target that is not an end of text stands for one.
    ends = int((targets[is_target] == 256).sum())
    assert masked.bits_per_byte(1.0, 3) == pytest.approx(18 / math.log(2) / (18 - ends))


def test_a_sample_depends_on_its_index_and_not_on_the_size_of_the_batch(
    made: TokenDataset,
):
    small = Batches(made, sequence=16, batch=4, seed=1)
    large = Batches(made, sequence=16, batch=8, seed=1)
    both = np.concatenate([small.samples(1)[0], small.samples(2)[0]])
    assert (both == large.samples(1)[0]).all()


def test_targets_are_the_tokens_that_follow_the_inputs_in_the_corpus(made: TokenDataset):
    batches = Batches(made, sequence=50, batch=64, seed=3)
    inputs, targets = batches.samples(2)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape == (64, 50)
    ring = np.concatenate([made.train, made.train[:51]]).astype("<u2").tobytes()
    for before, after in zip(inputs, targets, strict=True):
        assert (before[1:] == after[:-1]).all()
        window = np.append(before, after[-1]).astype("<u2").tobytes()
        assert window in ring


def test_a_step_is_the_same_after_the_tokens_are_reopened(made: TokenDataset):
    again = open_dataset(made.folder)
    assert again is not None
    first = Batches(made, sequence=20, batch=8, seed=9).samples(77)[0]
    assert (Batches(again, sequence=20, batch=8, seed=9).samples(77)[0] == first).all()


def test_no_two_epochs_take_their_windows_in_the_same_order(made: TokenDataset):
    batches = Batches(made, sequence=20, batch=1, seed=9)
    (windows,) = batches.epoch_sequences
    starts = np.concatenate([batches._starts(step, 0, 1) for step in range(1, 3 * windows + 1)])
    # Differences of neighbours, because the rotation of an epoch moves all its windows alike.
    orders = np.diff(starts.reshape(3, windows)) % len(made.train)
    assert len({tuple(order) for order in orders.tolist()}) == 3


def test_another_seed_and_another_epoch_give_another_order(made: TokenDataset):
    batches = Batches(made, sequence=20, batch=8, seed=9)
    other = Batches(made, sequence=20, batch=8, seed=10)
    later = batches._starts(1, 0, 8), batches._starts(1 + batches.epoch_sequences[0], 0, 8)
    assert (batches.samples(1)[0] != other.samples(1)[0]).any()
    assert (later[0] != later[1]).any()


def test_a_sample_names_the_documents_its_text_comes_from(made: TokenDataset):
    batches = Batches(made, sequence=400, batch=16, seed=2)
    root = made.folder.parent.parent
    end = made.tokenizer.end_of_text
    for sample in range(16):
        names = batches.document_names(4, sample)
        inputs, targets = (side[0].tolist() for side in batches.samples(4, sample, 1))
        pieces: list[list[int]] = [[]]
        for index in [*inputs, targets[-1]]:
            pieces[-1].append(index)
            if index == end:
                pieces.append([])
        pieces = [piece for piece in pieces if piece]
        assert len(names) == len(pieces)
        for name, piece in zip(names, pieces, strict=True):
            assert bytes(i for i in piece if i != end) in (root / name).read_bytes()


def test_held_out_windows_do_not_overlap_and_come_from_no_training_document(made: TokenDataset):
    batches = Batches(made, sequence=40, batch=4, seed=2)
    starts = batches._held_out_starts(7)
    assert len(starts) == 7
    assert (np.diff(starts) >= 40).all()
    assert starts[-1] + 41 <= len(made.held_out)
    blocks = list(batches.held_out_batches(7, rows=3))
    assert [len(inputs) for inputs, _ in blocks] == [3, 3, 1]
    lone = np.concatenate([inputs for inputs, _ in batches.held_out_batches(7)])
    assert (lone == np.concatenate([inputs for inputs, _ in blocks])).all()
    train = made.train.astype("<u2").tobytes()
    assert all(row.astype("<u2").tobytes() not in train for row in lone)


def test_asking_for_too_many_held_out_windows_gives_all_of_them(made: TokenDataset):
    batches = Batches(made, sequence=40, batch=4, seed=2)
    assert len(list(batches.held_out_batches(10**6))) == batches.held_out_sequences
    assert batches.held_out_sequences == (len(made.held_out) - 1) // 40


def test_bits_per_byte_counts_the_bytes_of_the_targets(made: TokenDataset):
    batches = Batches(made, sequence=40, batch=4, seed=2)
    targets = np.concatenate([targets for _, targets in batches.held_out_batches(9)])
    nbytes = int((targets != made.tokenizer.end_of_text).sum())
    expected = 1.5 * targets.size / math.log(2) / nbytes
    assert batches.bits_per_byte(1.5, 9) == pytest.approx(expected, rel=1e-12)


def test_the_same_model_has_the_same_bits_per_byte_in_any_tokenizer(tokens: MakeTokens):
    # Given a model that spends exactly 2 bits on each byte, whatever the tokens.
    made = tokens("bpe")
    batches = Batches(made, sequence=30, batch=2, seed=0)
    by_id = made.tokenizer.bytes_per_id()
    assert by_id is not None
    targets = np.concatenate([targets for _, targets in batches.held_out_batches(5)])
    loss = float(by_id[targets].mean()) * 2 * math.log(2)
    assert batches.bits_per_byte(loss, 5) == pytest.approx(2, rel=1e-12)


def test_a_corpus_that_is_too_short_is_refused_with_its_numbers(made: TokenDataset):
    least = min(len(made.train), len(made.held_out))
    with pytest.raises(DataError, match=rf"has {len(made.held_out)} held-out tokens and a "):
        Batches(made, sequence=least, batch=1, seed=0)
    with pytest.raises(InputErrors) as error:
        Batches(made, sequence=10**6, batch=1, seed=0)
    assert [("training" in message, "held-out" in message) for message in error.value.messages] == [
        (True, False),
        (False, True),
    ]


def test_one_token_more_than_a_sequence_is_enough(made: TokenDataset):
    least = min(len(made.train), len(made.held_out))
    batches = Batches(made, sequence=least - 1, batch=1, seed=0)
    assert batches.samples(3)[0].shape == (1, least - 1)
    assert len(list(batches.held_out_batches(4))) == 1


@pytest.mark.parametrize(("step", "first", "count"), [(0, 0, 1), (1, 3, 2), (1, -1, 1)])
def test_samples_outside_the_batch_are_refused(
    made: TokenDataset, step: int, first: int, count: int
):
    with pytest.raises(ValueError, match="no samples"):
        Batches(made, sequence=10, batch=4, seed=0).samples(step, first, count)
