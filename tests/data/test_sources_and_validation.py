"""Texts of several sources, each with its weight, and a validation text of one's own."""

from pathlib import Path

import numpy as np
import pytest
from made_text import prepare, words
from pydantic import ValidationError

from windlass.data.batches import Batches
from windlass.data.token_files import TokenDataset, dataset_statistics
from windlass.errors import DataError, InputErrors
from windlass.schema import DataRequest


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """Two folders of text; the second has other letters, and so other tokens."""
    for index in range(12):
        for name, text in (("first", words(40, index)), ("second", f"ZYX{index} " * 30)):
            path = tmp_path / name / f"{index:02}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return str(tmp_path / "first"), str(tmp_path / "second")


def mixed(sources: tuple[str, ...], tmp_path: Path, **settings: object) -> TokenDataset:
    return prepare(sources, tokenizer="byte", cache=tmp_path / "cache", **settings)


def test_a_weight_is_the_share_of_the_sequences_of_its_source(
    sources: tuple[str, str], tmp_path: Path
):
    tokens = mixed(sources, tmp_path, held_out=0.2)
    batches = Batches(tokens, sequence=16, batch=500, seed=3, weights=(3.0, 1.0))
    inputs, _ = batches.samples(1)
    more, _ = batches.samples(2)
    of_second = np.isin(np.concatenate([inputs, more]), list(b"ZYX")).any(axis=1)
    assert of_second.sum() == 250


def test_every_window_lies_in_one_source_and_an_epoch_of_each_has_all_its_tokens_once(
    sources: tuple[str, str], tmp_path: Path
):
    tokens = mixed(sources, tmp_path, held_out=0.2)
    # Given weights by which both sources end their first epoch within the same steps.
    windows = Batches(tokens, sequence=20, batch=1, seed=3).epoch_sequences
    batches = Batches(tokens, sequence=20, batch=500, seed=3, weights=tuple(map(float, windows)))
    first_end = tokens.meta.train.sources[0].tokens
    starts = np.concatenate([batches._starts(step, 0, 500) for step in range(1, 9)])
    sources_taken, indices = batches.mixture.locate(np.arange(4000))
    for source, (begin, end) in enumerate(((0, first_end), (first_end, len(tokens.train)))):
        of_epoch = (sources_taken == source) & (indices < windows[source])
        assert of_epoch.sum() == windows[source]
        offsets = (starts[of_epoch][:, None] - begin + np.arange(20)) % (end - begin)
        seen = np.bincount(offsets.ravel(), minlength=end - begin)
        assert seen.max() == 1
        assert (seen == 0).sum() == (end - begin) % 20
    ends = {0: tokens.train[:first_end], 1: tokens.train[first_end:]}
    for row in range(0, 500, 50):
        ring = np.concatenate([ends[int(sources_taken[row])]] * 2)
        inputs, _ = batches.samples(1, row, 1)
        assert inputs[0].astype(ring.dtype).tobytes() in ring.tobytes()


def test_a_sample_of_several_sources_names_documents_of_its_own_source(
    sources: tuple[str, str], tmp_path: Path
):
    tokens = mixed(sources, tmp_path)
    batches = Batches(tokens, sequence=16, batch=40, seed=0)
    taken, _ = batches.mixture.locate(np.arange(40))
    for sample, source in enumerate(taken.tolist()):
        names = batches.document_names(1, sample)
        assert names
        assert all(name.startswith(f"{sources[source]}: ") for name in names)


def test_another_source_moves_no_document_across_the_split(
    sources: tuple[str, str], tmp_path: Path
):
    alone, both = mixed(sources[:1], tmp_path), mixed(sources, tmp_path)
    assert both.meta.train.sources[0] == alone.meta.train.sources[0]
    assert (both.train[: len(alone.train)] == alone.train).all()


def test_a_validation_text_is_all_that_is_held_out(sources: tuple[str, str], tmp_path: Path):
    first, second = sources
    tokens = mixed((first,), tmp_path, validation=second)
    texts = [Path(first, f"{index:02}.txt").read_text(encoding="utf-8") for index in range(12)]
    held_out = [Path(second, f"{index:02}.txt").read_text(encoding="utf-8") for index in range(12)]
    decoded = [tokens.tokenizer.decode(ids.tolist()) for ids in (tokens.train, tokens.held_out)]
    assert [text.replace("\0", "") for text in decoded] == ["".join(texts), "".join(held_out)]
    assert tokens.meta.held_out.source == second


def test_a_validation_file_that_is_also_trained_on_is_refused(
    sources: tuple[str, str], tmp_path: Path
):
    first, _ = sources
    with pytest.raises(DataError, match=r"`03\.txt` of `data\.validation` = .* is also trained on"):
        mixed((first,), tmp_path, validation=f"{first}/03.txt")


def test_statistics_count_sources_duplicates_and_leaks(sources: tuple[str, str], tmp_path: Path):
    first, second = sources
    Path(second, "copy.txt").write_text(Path(first, "01.txt").read_text())
    validation = tmp_path / "validation.jsonl"
    validation.write_text('{"text": "new"}\n{"text": "ZYX3 ZYX3"}\n', encoding="utf-8")
    Path(second, "short.txt").write_text("ZYX3 ZYX3", encoding="utf-8")
    data = DataRequest(source=sources, weights=(1, 3), validation=str(validation), tokenizer="byte")
    tokens = mixed(sources, tmp_path, validation=str(validation))
    statistics = dataset_statistics(data, tokens)
    meta = statistics.meta
    assert [part.documents for part in meta.train.sources] == [12, 14]
    assert (meta.train.duplicates, meta.held_out_in_training) == (1, 1)
    assert statistics.shares == (0.25, 0.75)
    assert meta.unused_entries == 257 - len(set(tokens.train.tolist()))
    lengths = sorted(np.diff(tokens.documents.starts).tolist())
    assert statistics.document_tokens[0] == lengths[0]
    assert statistics.document_tokens[-1] == lengths[-1]
    assert sum(part.tokens for part in meta.train.sources) == len(tokens.train)


def test_all_sources_that_are_missing_are_named_at_once(tmp_path: Path):
    with pytest.raises(InputErrors) as error:
        mixed(("no/such", "nor/this"), tmp_path, validation="nothing")
    assert len(error.value.messages) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ("a", "b"), "weights": (1,)}, "1 `weights` for 2 sources"),
        ({"source": ("a", "b"), "weights": (1, 0)}, "each should be a positive number"),
        ({"source": ("a", "a")}, "each of them once"),
        ({"source": ()}, "at least one source"),
        ({"validation": "v", "held_out": 0.1}, "holds out nothing of `source`"),
    ],
    ids=["too few weights", "a weight of zero", "a source twice", "no source", "two held out"],
)
def test_sources_weights_and_validation_that_disagree_are_refused(
    settings: dict[str, object], message: str
):
    with pytest.raises(ValidationError, match=message):
        DataRequest.model_validate(settings)
