import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_text import prepare, words

from windlass.data.token_files import TokenDataset, open_dataset
from windlass.data.tokenizer import byte_tokenizer, load_tokenizer
from windlass.errors import DataError, InputErrors, StorageError

MakeFolder = Callable[..., Path]
MakeTokens = Callable[..., TokenDataset]


def documents(made: TokenDataset, split: str = "train") -> list[str]:
    """The texts of one side, decoded again."""
    ids = made.train if split == "train" else made.held_out
    ends = np.flatnonzero(ids == made.tokenizer.end_of_text)
    return [made.tokenizer.decode(part.tolist()) for part in np.split(ids, ends + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_every_document_is_stored_byte_for_byte_on_one_side(tokens: MakeTokens, tokenizer: str):
    made = tokens(tokenizer)
    train, held_out = documents(made), documents(made, "held_out")
    expected = [words(80, index) for index in range(40)]
    assert sorted(train + held_out) == sorted(expected)
    named = {made.documents.name(index): text for index, text in enumerate(train)}
    assert all(text == expected[int(name[2:4])] for name, text in named.items())
    assert 1 <= len(held_out) <= 20


def test_the_second_time_nothing_is_read_or_encoded_again(tokens: MakeTokens, tmp_path: Path):
    first = tokens("bpe")
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    labels: list[str] = []
    second = prepare(
        str(tmp_path / "corpus"),
        vocabulary=400,
        held_out=0.2,
        cache=tmp_path / "cache",
        progress=lambda *news: labels.append(news[0]),
    )
    assert second.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert set(labels) == {"checking files"}


def test_the_same_text_gives_the_same_tokens_in_any_folder(folder: MakeFolder, tmp_path: Path):
    root = folder()
    copy = shutil.copytree(root, tmp_path / "elsewhere")
    made = [
        prepare(str(path), vocabulary=400, cache=tmp_path / f"cache{index}")
        for index, path in enumerate((root, copy))
    ]
    assert made[0].fingerprint == made[1].fingerprint
    assert made[0].folder.name == made[1].folder.name
    assert (made[0].train == made[1].train).all()


def test_changed_text_or_settings_are_prepared_again(folder: MakeFolder, tmp_path: Path):
    root, cache = folder(), tmp_path / "cache"
    made = [
        prepare(str(root), tokenizer="byte", cache=cache),
        prepare(str(root), tokenizer="byte", held_out=0.3, cache=cache),
        prepare(str(root), tokenizer="byte", limit_bytes=5000, cache=cache),
        prepare(str(root), tokenizer="bpe", vocabulary=300, cache=cache),
        prepare(str(root), tokenizer="bpe", vocabulary=310, cache=cache),
    ]
    path = root / "a" / "00.txt"
    # Given a change that keeps the file's size.
    path.write_text(path.read_text(encoding="utf-8").replace("the", "hte"), encoding="utf-8")
    made.append(prepare(str(root), tokenizer="byte", cache=cache))
    assert len({tokens.folder for tokens in made}) == len({tokens.fingerprint for tokens in made})
    assert len({tokens.folder for tokens in made}) == 6


def test_an_added_document_moves_no_other_across_the_split(folder: MakeFolder, tmp_path: Path):
    root, cache = folder(), tmp_path / "cache"
    before = set(documents(prepare(str(root), tokenizer="byte", held_out=0.2, cache=cache)))
    (root / "new.txt").write_text("something new", encoding="utf-8")
    after = set(documents(prepare(str(root), tokenizer="byte", held_out=0.2, cache=cache)))
    assert after - before <= {"something new"}
    assert before <= after


@pytest.mark.parametrize("held_out", [1e-9, 1 - 1e-9])
def test_both_sides_of_the_split_have_a_document_whatever_the_share(
    folder: MakeFolder, tmp_path: Path, held_out: float
):
    made = prepare(
        str(folder(documents=2)), tokenizer="byte", held_out=held_out, cache=tmp_path / "cache"
    )
    assert (made.meta.train.documents, made.meta.held_out.documents) == (1, 1)


def test_statistics_agree_with_counting_by_hand(tokens: MakeTokens):
    made = tokens("bpe")
    train, held_out = made.train.tolist(), made.held_out.tolist()
    counts = Counter(train)
    nats = -sum(n / len(train) * math.log(n / len(train)) for n in counts.values())
    cost = -sum(math.log((counts[i] + 1) / (len(train) + made.vocabulary)) for i in held_out)
    nbytes = sum(len(text.encode()) for text in documents(made, "held_out"))
    meta = made.meta
    assert meta.unigram_nats == pytest.approx(nats, rel=1e-12)
    assert meta.held_out_unigram_nats == pytest.approx(cost / len(held_out), rel=1e-12)
    assert meta.held_out_unigram_bits_per_byte == pytest.approx(cost / math.log(2) / nbytes)
    assert meta.held_out.nbytes == nbytes == made.held_out_bytes.sum()
    assert (meta.train.tokens, meta.held_out.tokens) == (len(train), len(held_out))
    assert meta.bytes_per_token == pytest.approx(meta.train.nbytes / len(train))


def test_ids_are_as_narrow_as_the_vocabulary_allows(tokens: MakeTokens, tmp_path: Path):
    assert tokens("byte").train.dtype == np.uint16
    wide = byte_tokenizer()
    wide.backend.add_tokens([f"word{index}" for index in range(2**16)])
    wide.save(tmp_path / "wide.json")
    made = prepare(
        str(tmp_path / "corpus"), tokenizer=str(tmp_path / "wide.json"), cache=tmp_path / "cache"
    )
    assert made.vocabulary == 257 + 2**16
    assert made.train.dtype == np.uint32


def test_a_tokenizer_of_another_run_is_used_unchanged(tokens: MakeTokens, tmp_path: Path):
    first = tokens("bpe")
    first.tokenizer.save(tmp_path / "mine.json")
    second = prepare(
        str(tmp_path / "corpus"),
        tokenizer=str(tmp_path / "mine.json"),
        held_out=0.2,
        cache=tmp_path / "cache",
    )
    assert second.folder != first.folder
    assert (second.train == first.train).all()
    text = "kato the of"
    assert load_tokenizer(second.folder / "tokenizer.json").encode(text) == (
        first.tokenizer.encode(text)
    )


@pytest.mark.parametrize(
    "name",
    ["train.bin", "held_out.bin", "tokenizer.json", "meta.json", "meta.sha256",
     "train.documents.npy", "train.names.txt", "held_out.bytes.bin"],
)  # fmt: skip
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_to_any_file_is_detected_and_repaired(tokens: MakeTokens, name: str, harm: str):
    made = tokens("byte", documents=6)
    good = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    content = bytearray(good[name])
    content[len(content) // 2] ^= 1
    path = made.folder / name
    match harm:
        case "flip":
            path.write_bytes(content)
        case "cut":
            path.write_bytes(good[name][:-1])
        case _:
            path.unlink()
    assert open_dataset(made.folder) is None
    again = tokens("byte", documents=6)
    assert again.fingerprint == made.fingerprint
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == good


def test_a_killed_preparation_leaves_nothing_that_counts_as_tokens(
    tokens: MakeTokens, tmp_path: Path
):
    made = tokens("byte", documents=6)
    rest = made.folder.with_name(f".{made.folder.name}.0123abcd.tmp")
    made.folder.rename(rest)
    (rest / "meta.sha256").unlink()
    again = tokens("byte", documents=6)
    assert again.fingerprint == made.fingerprint
    assert not rest.exists()
    assert not list((tmp_path / "cache").glob("*.tmp"))


PREPARE = """
import resource, sys
from pathlib import Path
from windlass.data import prepare_dataset
from windlass.schema import DataRequest
source, cache, largest = sys.argv[1:]
if largest != "none":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), int(largest)))
labels = set()
report = lambda *progress: labels.add(progress[0])
data = DataRequest(source=source, vocabulary=400)
made = prepare_dataset(data, cache=Path(cache), progress=report)
print(made.fingerprint, "encoding" in labels)
"""


def prepare_in_child(source: Path, cache: Path, largest: str = "none") -> subprocess.Popen[str]:
    """Prepares in a process of its own; `largest` is the largest file it may write."""
    command = [sys.executable, "-c", PREPARE, str(source), str(cache), largest]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True)


def test_one_of_several_processes_prepares_and_all_get_the_same(folder: MakeFolder, tmp_path: Path):
    root = folder(documents=60, count=800)
    children = [prepare_in_child(root, tmp_path / "cache") for _ in range(3)]
    answers = [child.communicate(timeout=60)[0].split() for child in children]
    assert len({fingerprint for fingerprint, _ in answers}) == 1
    assert [encoded for _, encoded in answers].count("True") == 1


def test_a_full_disk_is_reported_and_leaves_no_tokens(folder: MakeFolder, tmp_path: Path):
    child = prepare_in_child(folder(), tmp_path / "cache", "4000")
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 1
    assert "StorageError: no space left to write" in errors
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_file_that_changes_while_it_is_read_is_reported(folder: MakeFolder, tmp_path: Path):
    root = folder()
    path = root / "a" / "00.txt"

    def meddle(*news: object) -> None:
        if news[0] == "encoding":
            path.write_text("other", encoding="utf-8")

    with pytest.raises(DataError, match=r"00\.txt` changed while it was being read"):
        prepare(str(root), tokenizer="byte", cache=tmp_path / "cache", progress=meddle)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_all_errors_of_a_corpus_are_reported_at_once(tmp_path: Path):
    for index in range(30):
        (tmp_path / f"{index:02}.txt").write_bytes(b"\xff" if index > 1 else b"good")
    with pytest.raises(InputErrors) as error:
        prepare(str(tmp_path), tokenizer="byte", cache=tmp_path / ".cache")
    assert len(error.value.messages) == 21
    assert "02.txt` is not UTF-8: byte 0 is 0xff" in error.value.messages[0]
    assert error.value.messages[-1] == "and maybe more; reading stopped after 20"


def test_a_single_error_is_a_data_error(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no field `text`; fields are `body`"):
        prepare(str(path), tokenizer="byte", cache=tmp_path / "cache")


def test_a_corpus_without_text_or_with_one_document_is_refused(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="everything that was read of it is empty"):
        prepare(str(path), tokenizer="byte", cache=tmp_path / "cache")
    path.write_text("hello", encoding="utf-8")
    with pytest.raises(DataError, match="is too short: it has one document of 5 bytes"):
        prepare(str(path), tokenizer="byte", cache=tmp_path / "cache")


def test_an_unknown_tokenizer_suggests_the_nearest(folder: MakeFolder, tmp_path: Path):
    with pytest.raises(DataError, match="no tokenizer `bep`; did you mean `bpe`"):
        prepare(str(folder()), tokenizer="bep", cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"write `byte`, `bpe`, or a `tokenizer\.json`"):
        prepare(str(folder()), tokenizer="/no/such/file", cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_created_is_reported(folder: MakeFolder, tmp_path: Path):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be created"):
        prepare(str(folder()), tokenizer="byte", cache=tmp_path / "file")


def test_hashes_are_cached_and_a_damaged_cache_does_no_harm(folder: MakeFolder, tmp_path: Path):
    root, cache = folder(), tmp_path / "cache"
    for path in root.rglob("*.txt"):
        os.utime(path, (1e9, 1e9))
    first = prepare(str(root), tokenizer="byte", cache=cache)
    for memory in cache.glob("hashes-*.json"):
        memory.write_text("{", encoding="utf-8")
    assert prepare(str(root), tokenizer="byte", cache=cache).folder == first.folder


def test_the_default_corpus_is_split_alike_every_time(tmp_path: Path):
    made = prepare("stdlib", tokenizer="byte", limit_bytes=2**20, cache=tmp_path / "cache")
    assert made.meta.train.documents > 20
    assert made.meta.held_out.documents >= 1
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "cache")
    again = prepare("stdlib", tokenizer="byte", limit_bytes=2**20, cache=tmp_path / "cache")
    assert again.fingerprint == made.fingerprint
    assert made.meta.train.source == "stdlib"
