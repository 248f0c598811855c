"""Rows of conversations: what a batch holds, and what is left out."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_text import prepare

from windlass.data import TokenDataset, conversation_batches, open_dataset
from windlass.data.examples import IGNORED_TARGET, target_counts
from windlass.data.packing.row_layout import pack
from windlass.errors import DataError, InputErrors

Prepared = Callable[..., TokenDataset]


@pytest.fixture
def conversations(tmp_path: Path) -> Prepared:
    """Prepares sums as conversations of one to three turns, with bytes as tokens."""

    def make(count: int = 60, weight: float | None = None, **settings: object) -> TokenDataset:
        draw, path = random.Random(0), tmp_path / "sums.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for _ in range(count):
                turns = []
                for _ in range(draw.randint(1, 3)):
                    a, b = draw.randint(0, 99), draw.randint(0, 99)
                    turns.append({"role": "user", "content": f"{a} + {b}?"})
                    answer: dict[str, object] = {"role": "assistant", "content": f"It is {a + b}."}
                    turns.append(answer if weight is None else answer | {"weight": weight})
                file.write(json.dumps({"messages": turns}) + "\n")
        settings = {"tokenizer": "byte", "held_out": 0.2, "format": "chat", **settings}
        return prepare(str(path), cache=tmp_path / "cache", **settings)

    return make


def answers(tokens: TokenDataset, targets: np.ndarray) -> list[str]:
    """The text of each row's targets."""
    decode = tokens.tokenizer.backend.decode
    return [
        decode(row[row != IGNORED_TARGET].tolist(), skip_special_tokens=False) for row in targets
    ]


def test_a_row_is_one_conversation_whose_answers_alone_are_targets(conversations: Prepared):
    tokens = conversations()
    batches = conversation_batches(tokens, sequence=128, batch=4, seed=3)
    inputs, targets = batches.samples(1)
    for row, learned in zip(inputs, answers(tokens, targets), strict=True):
        text = tokens.tokenizer.backend.decode(row.tolist(), skip_special_tokens=False)
        said = [part.split("assistant:\n")[1] for part in text.split("user:\n")[1:]]
        # The last end of text of a conversation is a target, and the next ones fill the row.
        expected = "".join(each.split("<|endoftext|>")[0] + "<|endoftext|>" for each in said)
        assert learned == expected
    assert (targets != IGNORED_TARGET).sum(axis=1).tolist() == batches.target_counts(1).tolist()


def test_a_target_follows_its_input_in_the_document(conversations: Prepared):
    batches = conversation_batches(conversations(), sequence=128, batch=5, seed=3)
    inputs, targets = batches.samples(2)
    rows, places = np.nonzero(targets[:, :-1] != IGNORED_TARGET)
    assert (inputs[rows, places + 1] == targets[rows, places]).all()


def test_an_epoch_has_each_conversation_once_in_an_order_of_its_own(conversations: Prepared):
    tokens = conversations()
    batches = conversation_batches(tokens, sequence=128, batch=1, seed=3)
    count = tokens.meta.train.documents
    epochs = [
        [batches.document_names(step, 0) for step in range(first + 1, first + count + 1)]
        for first in (0, count)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == count
    assert epochs[0] != epochs[1]


def test_micro_batches_have_the_samples_of_the_batch(conversations: Prepared):
    batches = conversation_batches(conversations(), sequence=64, batch=6, seed=1)
    whole = batches.samples(3)
    parts = [batches.samples(3, first, 2) for first in (0, 2, 4)]
    for index, array in enumerate(whole):
        assert np.array_equal(array, np.concatenate([part[index] for part in parts]))


def test_long_conversations_lose_their_end_or_are_left_out_and_are_counted(
    conversations: Prepared,
):
    tokens = conversations()
    lengths = np.concatenate(
        [np.diff(index.starts) for index in (tokens.documents, tokens.held_out_documents)]
    )
    longer = int((lengths - 1 > 64).sum())
    cut = conversation_batches(tokens, sequence=64, batch=2, seed=0)
    assert f"{longer} conversations are longer than 64 tokens and lose their end" in cut.notes
    dropped = conversation_batches(tokens, sequence=64, batch=2, seed=0, drop_long=True)
    assert f"{longer} conversations are longer than 64 tokens and are left out" in dropped.notes


def test_a_sequence_in_which_no_answer_fits_is_refused(conversations: Prepared):
    with pytest.raises(InputErrors, match=r"has an answer within 8 tokens; raise `train.sequence`"):
        conversation_batches(conversations(), sequence=8, batch=2, seed=0)


def test_bits_per_byte_count_the_bytes_of_answers(conversations: Prepared):
    tokens = conversations()
    batches = conversation_batches(tokens, sequence=128, batch=2, seed=0)
    learned = [t for _, part in batches.held_out_batches(99) for t in answers(tokens, part)]
    count = sum(len(tokens.tokenizer.backend.encode(text).ids) for text in learned)
    nbytes = sum(len(text.replace("<|endoftext|>", "").encode()) for text in learned)
    bits = batches.bits_per_byte(1.0, 99)
    assert bits == pytest.approx(count / np.log(2) / nbytes, rel=1e-12)


def test_conversations_are_found_again_and_depend_on_their_template(conversations: Prepared):
    tokens = conversations()
    assert conversations().folder == tokens.folder
    other = conversations(chat_template="chatml")
    assert other.folder != tokens.folder
    assert other.fingerprint != tokens.fingerprint
    (tokens.folder / "train.weights.bin").write_bytes(b"")
    assert open_dataset(tokens.folder) is None


def test_several_sources_have_their_shares(conversations: Prepared, tmp_path: Path):
    conversations()
    lines = (tmp_path / "sums.jsonl").read_text(encoding="utf-8").splitlines()
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(paths, (lines[:40], lines[40:]), strict=True):
        path.write_text("\n".join(part).replace("It is", path.stem), encoding="utf-8")
    tokens = prepare(
        tuple(map(str, paths)), cache=tmp_path / "cache", tokenizer="byte", format="chat"
    )
    batches = conversation_batches(tokens, sequence=128, batch=1000, seed=0, weights=(1.0, 3.0))
    names = [batches.document_names(1, sample)[0] for sample in range(1000)]
    assert sum("a.jsonl" in name for name in names) == 250


def test_all_broken_rows_are_reported_at_once(tmp_path: Path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"messages": []}\n{oops\n{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(InputErrors) as caught:
        prepare(str(path), cache=tmp_path / "cache", tokenizer="byte", format="chat")
    assert [f"{path}:{row}:" in str(caught.value) for row in (1, 2, 3)] == [True] * 3


def test_text_is_no_conversation(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(DataError, match="no conversations in"):
        prepare(str(tmp_path / "a.txt"), cache=tmp_path, tokenizer="byte", format="chat")


def test_packed_rows_hold_each_conversation_once_and_whole(conversations: Prepared):
    tokens = conversations()
    alone = conversation_batches(tokens, sequence=160, batch=1, seed=3)
    packed = conversation_batches(tokens, sequence=160, batch=1, seed=3, packing=True)
    rows = int(packed.notes[-1].split(" rows")[0].split()[-1])
    count = tokens.meta.train.documents
    texts = []
    for step in range(1, rows + 1):
        (inputs,), (targets,) = packed.samples(step)
        (ids,) = packed.document_ids(step, 0, 1)
        kept = [(inputs[ids == i], targets[ids == i]) for i in range(int(ids.max()))]
        texts += [(row.tolist(), learned.tolist()) for row, learned in kept]
        assert len(packed.document_names(step, 0)) == len(kept)
        fill = targets[ids == ids.max()]
        assert len(kept) == int(ids.max())
        assert packed.target_counts(step)[0] == (targets != IGNORED_TARGET).sum()
        assert len(fill) == 160 - sum(len(row) for row, _ in kept) or not len(fill)
    expected = []
    for step in range(1, count + 1):
        (inputs,), (targets,) = alone.samples(step)
        length = int(np.flatnonzero(targets != IGNORED_TARGET)[-1]) + 1
        expected.append((inputs[:length].tolist(), targets[:length].tolist()))
    # The two line ends behind the last answer are inputs, but no targets.
    assert sorted(
        (row[: len(e)], t[: len(e)])
        for (row, t), (e, _) in zip(sorted(texts), sorted(expected), strict=True)
    ) == sorted(expected)
    assert f"packing factor {count / rows:.2f}: {count} training conversations" in packed.notes[-1]


def test_the_mean_length_of_a_tokens_document_is_that_of_all_rows(conversations: Prepared):
    packed = conversation_batches(conversations(), sequence=160, batch=1, seed=3, packing=True)
    rows = int(packed.notes[-1].split(" rows")[0].split()[-1])
    lengths = []
    for step in range(1, rows + 1):
        _, counts = np.unique(packed.document_ids(step, 0, 1), return_counts=True)
        lengths += np.repeat(counts, counts).tolist()
    assert packed.document_tokens == pytest.approx(np.mean(lengths), rel=1e-12)
    assert (
        conversation_batches(conversations(), sequence=160, batch=1, seed=3).document_tokens is None
    )


def test_best_fit_fills_rows_and_holds_each_length_once():
    lengths = np.array([7, 3, 5, 2, 8, 1, 4, 6, 10, 2, 2])
    rows = pack(lengths, 10)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= 10 for row in rows)
    assert len(rows) == 5  # 50 tokens


def test_held_out_rows_are_packed_too(conversations: Prepared):
    batches = conversation_batches(conversations(), sequence=160, batch=1, seed=3, packing=True)
    pairs = list(batches.held_out_batches(99, 2))
    ids = list(batches.held_out_documents(99, 2))
    assert [part.shape for part, _ in pairs] == [part.shape for part in ids]


@pytest.mark.parametrize("packing", [False, True])
def test_answers_of_half_a_weight_are_the_same_rows_and_count_half(
    conversations: Prepared, packing: bool
):
    both = [
        conversation_batches(
            conversations(weight=weight), sequence=64, batch=4, seed=3, packing=packing
        )
        for weight in (None, 0.5)
    ]
    (inputs, targets), (same, weighted) = (each.samples(2) for each in both)
    assert (inputs == same).all()
    assert (weighted[:, 0] == targets).all()
    counts, sums = (each.target_counts(2) for each in both)
    assert sums.tolist() == (counts / 2).tolist() == target_counts(weighted).tolist()
