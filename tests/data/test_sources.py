import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from made_text import words
from pyarrow import parquet

from windlass.data.readers import (
    SourceFile,
    TextDocument,
    TextRows,
    UnreadableDocument,
    read_documents,
)
from windlass.data.sources import find_corpus
from windlass.errors import DataError


def texts(source: Path | str, text_field: str = "text") -> dict[str, str]:
    """All documents by name; fails on an error."""
    items = list(find_corpus(str(source)).documents(rows=TextRows(text_field), limit_bytes=None))
    assert not [item for item in items if isinstance(item, UnreadableDocument)]
    return {item.name: item.text for item in items if isinstance(item, TextDocument)}


def errors(source: Path | str, text_field: str = "text") -> list[str]:
    items = find_corpus(str(source)).documents(rows=TextRows(text_field), limit_bytes=None)
    return [item.message for item in items if isinstance(item, UnreadableDocument)]


def test_the_standard_library_is_read_without_tests_and_installed_packages():
    documents = texts("stdlib")
    assert len(documents) > 300
    assert documents["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    outside = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
    assert not [name for name in documents if outside & set(name.split("/"))]
    assert list(documents) == sorted(documents)
    assert all(name.endswith(".py") for name in documents)


def test_a_folder_gives_its_text_files_by_relative_name_and_skips_others(
    folder: Callable[..., Path],
):
    root = folder(documents=6)
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (root / "empty.txt").write_bytes(b"")
    (root / "notes").write_text("no suffix, still text", encoding="utf-8")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "secret.txt").write_text("passed by", encoding="utf-8")
    documents = texts(root)
    assert list(documents) == [
        "a/00.txt", "a/02.txt", "a/04.txt", "b/01.txt", "b/03.txt", "b/05.txt", "notes"
    ]  # fmt: skip
    assert documents["a/02.txt"] == words(80, 2)


@given(
    content=st.text(max_size=5000),
    repeat=st.integers(1, 30),
)
def test_a_lone_text_is_split_into_chunks_that_join_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, content: str, repeat: int
):
    path = tmp_path_factory.getbasetemp() / "lone.txt"
    path.write_bytes((content * repeat).encode())
    items = list(
        read_documents(
            SourceFile(name="lone.txt", path=path, single_document=False), TextRows("text")
        )
    )
    pieces = [item for item in items if isinstance(item, TextDocument)]
    assert len(pieces) == len(items)
    assert "".join(piece.text for piece in pieces) == content * repeat
    assert all(0 < piece.nbytes <= 16 * 2**10 for piece in pieces)
    assert all(piece.nbytes == len(piece.text.encode()) for piece in pieces)


def test_a_large_lone_text_is_split_at_line_ends_near_16_kib(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text(words(150_000, 1), encoding="utf-8")
    documents = texts(path)
    assert len(documents) > 20
    assert all(piece.endswith("\n") for piece in documents.values())
    assert all(len(piece.encode()) > 15 * 2**10 for piece in list(documents.values())[:-1])
    assert next(iter(documents)) == "book.txt@0"


def test_the_only_file_of_a_folder_is_split_too(tmp_path: Path):
    (tmp_path / "only.txt").write_text(words(2000, 1), encoding="utf-8")
    assert len(texts(tmp_path)) > 3


def test_a_json_lines_file_gives_a_document_per_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": f"héllo {i}", "n": i}) for i in range(3)]
    path.write_text("\n\n".join([*rows, json.dumps({"text": ""})]), encoding="utf-8")
    assert texts(path) == {
        "rows.jsonl:1": "héllo 0", "rows.jsonl:3": "héllo 1", "rows.jsonl:5": "héllo 2"
    }  # fmt: skip


def test_all_errors_of_a_json_lines_file_name_their_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    lines = [
        b'{"text": "good"}', b'{"text": ', b'{"body": "x", "title": "y"}', b'{"text": 3}',
        b"[1]", b'{"text": "\xff"}', b'{"text": "\\ud800"}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    at = path.read_bytes().index(b"\xff")
    assert errors(path) == [
        f"{path}:2: not JSON: expecting value at column 10",
        f"{path}:3: no field `text`; fields are `body`, `title`; name yours as `data.text_field`",
        f"{path}:4: `text` is of type int, not text",
        f"{path}:5: holds a list, not an object with fields",
        f"`{path}` is not UTF-8: byte {at} is 0xff; convert it, or remove it from the corpus",
        f"{path}:7: `text` has half a surrogate pair at character 0",
    ]


def test_a_parquet_file_gives_a_document_per_row(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    column = [None if i % 1000 == 7 else f"row {i} é" for i in range(2500)]
    parquet.write_table(pa.table({"body": column, "n": list(range(2500))}), path)
    documents = texts(path, "body")
    assert len(documents) == 2497
    assert documents["rows.parquet:2499"] == "row 2499 é"
    assert errors(path) == [
        f"`{path}`: no field `text`; fields are `body`, `n`; name yours as `data.text_field`"
    ]


def test_a_damaged_parquet_file_is_an_error_with_its_name(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 not really")
    assert errors(path)[0].startswith(f"`{path}` is not a Parquet file: ")


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_parquet_file_with_a_flipped_byte_is_read_or_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, place: float, flip: int
):
    path = tmp_path_factory.mktemp("flipped") / "rows.parquet"
    parquet.write_table(pa.table({"text": [f"row {i}" for i in range(300)]}), path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= flip
    path.write_bytes(content)
    assert all(str(path) in error for error in errors(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: expecting property name"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ('{"text": ' + "1" * 5000 + "}", "cannot be read: exceeds the limit (4300 digits)"),
    ],
    ids=["torn", "deep", "long"],
)
def test_a_line_that_is_not_json_is_an_error_with_its_number(
    tmp_path: Path, line: str, reason: str
):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n', encoding="utf-8")
    [error] = errors(path)
    assert error.startswith(f"{path}:2: {reason}")


def test_a_folder_may_mix_texts_and_tables(tmp_path: Path):
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "line"}\n', encoding="utf-8")
    parquet.write_table(pa.table({"text": ["row"]}), tmp_path / "c.parquet")
    assert texts(tmp_path) == {"a.txt": "plain", "b.jsonl:1": "line", "c.parquet:0": "row"}


def saved(root: Path, rows: list[str]) -> Path:
    """A folder as Hugging Face `save_to_disk` lays it out."""
    root.mkdir(parents=True)
    table = pa.table({"text": rows})
    path = root / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (root / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return root


def test_a_saved_dataset_gives_a_document_per_row(tmp_path: Path):
    root = saved(tmp_path / "set", [f"row {i}" for i in range(10)])
    assert list(texts(root).values()) == [f"row {i}" for i in range(10)]


def test_a_saved_dataset_dict_gives_its_training_split(tmp_path: Path):
    saved(tmp_path / "train", ["one"])
    saved(tmp_path / "test", ["two"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    assert list(texts(tmp_path).values()) == ["one"]
    (tmp_path / "train" / "state.json").unlink()
    with pytest.raises(DataError, match="no split `train` but `test`; name one of them"):
        find_corpus(str(tmp_path))


def test_a_saved_dataset_without_its_files_is_refused(tmp_path: Path):
    root = saved(tmp_path / "set", ["one"])
    (root / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="are missing"):
        find_corpus(str(root))
    (root / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"state\.json` is damaged"):
        find_corpus(str(root))


def test_datasets_by_name_and_by_folder_are_read_as_the_library_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    rows = [f"row {i} é" for i in range(10)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
    assert list(texts(tmp_path / "saved").values()) == rows
    named = tmp_path / "named"
    named.mkdir()
    parquet.write_table(pa.table({"text": rows}), named / "train.parquet")
    assert list(texts(f"hf:{named}").values()) == rows
    with pytest.raises(DataError, match="is 5 of the 10 rows of a split"):
        find_corpus(f"hf:{named}:train[:50%]")
    with pytest.raises(DataError, match="cannot be loaded: "):
        find_corpus(f"hf:{named}:validation")


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [("datasets", "hf:some/set", "datasets"), ("pyarrow", "rows.parquet", "parquet")],
)
def test_a_missing_package_names_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str, extra: str
):
    monkeypatch.chdir(tmp_path)
    Path("rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"install `windlass\[{extra}\]`"):
        texts(source)


def test_a_missing_path_suggests_the_nearest_existing_one(tmp_path: Path):
    (tmp_path / "shakespeare.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError) as error:
        find_corpus(str(tmp_path / "shakespere.txt"))
    assert str(error.value) == (
        f"no file or folder `{tmp_path}/shakespere.txt`; did you mean `{tmp_path}/shakespeare.txt`?"
    )
    with pytest.raises(DataError, match="did you mean `stdlib`"):
        find_corpus("stdlb")
    with pytest.raises(DataError, match="there is no folder"):
        find_corpus(str(tmp_path / "nowhere" / "x.txt"))


@pytest.mark.parametrize("source", ["hf:", "hf::train", "hf:name:"])
def test_a_dataset_without_a_name_says_how_to_write_it(source: str):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="names no dataset; write it as"):
        find_corpus(source)


def test_text_that_is_not_utf_8_is_reported_with_file_and_byte(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes("café".encode())
    (tmp_path / "c.txt").write_bytes(b"x" * 1_200_000 + b"\xff" + b"y" * 100_000)
    assert errors(tmp_path) == [
        f"`{tmp_path / name}` is not UTF-8: byte {at} is 0x{byte:02x}; convert it, or remove it "
        "from the corpus"
        for name, at, byte in (("a.txt", 3, 0xE9), ("c.txt", 1_200_000, 0xFF))
    ]


def test_a_folder_or_file_without_text_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no text in"):
        find_corpus(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="no text in"):
        find_corpus(str(tmp_path))
    with pytest.raises(DataError, match="does not look like text"):
        find_corpus(str(tmp_path / "x.bin"))


@given(limit=st.integers(1, 20_000))
@settings(max_examples=20)
def test_a_limit_takes_full_documents_up_to_the_one_that_reaches_it(limit: int):
    corpus = find_corpus("stdlib")
    sizes = [
        item.nbytes
        for item in corpus.documents(rows=TextRows("text"), limit_bytes=limit)
        if isinstance(item, TextDocument)
    ]
    assert sum(sizes[:-1]) < limit <= sum(sizes)
