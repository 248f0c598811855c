"""Files are read as what they hold: tables of JSON by any name, compressed text, marks, Arrow."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from pyarrow import ipc

from windlass.data import prepare_dataset
from windlass.data.chat import ChatRows, find_chat_template
from windlass.data.readers import RowFormat, TextDocument, TextRows, UnreadableDocument
from windlass.data.sources import find_corpus
from windlass.errors import DataError
from windlass.schema import DataRequest

ROWS = [{"text": f"row {n} \N{LATIN SMALL LETTER E WITH ACUTE}", "n": n} for n in range(5)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(source: Path, rows: RowFormat = TextRows("text")) -> list[str]:  # noqa: B008  frozen
    """Texts of all documents, or what is wrong with them."""
    items = find_corpus(str(source)).documents(rows=rows, limit_bytes=None)
    return [item.text if isinstance(item, TextDocument) else item.message for item in items]


@pytest.mark.parametrize("name", ["rows.json", "rows.ndjson", "rows.jsonl", "rows.txt", "rows"])
def test_json_lines_are_rows_whatever_their_file_is_called(tmp_path: Path, name: str):
    (tmp_path / name).write_text(LINES, encoding="utf-8")
    assert read(tmp_path / name) == TEXTS
    (tmp_path / "other.txt").write_text("a text beside them", encoding="utf-8")
    assert sorted(read(tmp_path)) == sorted([*TEXTS, "a text beside them"])


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_is_a_row_for_each(tmp_path: Path, indent: int | None):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=indent), encoding="utf-8")
    assert read(tmp_path / "rows.json") == TEXTS


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(str.isprintable), min_size=1),
    padding=st.integers(0, 70_000),
)
def test_an_array_is_read_alike_wherever_its_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], padding: int
):
    path = tmp_path_factory.getbasetemp() / "array.json"
    rows = [{"pad": "x" * padding}, *({"text": text} for text in texts)]
    rows[0]["text"] = "first"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert read(path) == ["first", *texts]


def test_rows_of_json_without_the_field_are_refused_and_not_trained_as_text(tmp_path: Path):
    (tmp_path / "rows.json").write_text('{"body": "x"}\n{"body": "y"}\n', encoding="utf-8")
    (tmp_path / "array.json").write_text('[{"body": "x"}]', encoding="utf-8")
    (tmp_path / "one.json").write_text('{"text": "x"}', encoding="utf-8")

    (message, _) = read(tmp_path / "rows.json")
    assert "rows.json:1: no field `text`; fields are `body`; name yours as" in message
    (message,) = read(tmp_path / "array.json")
    assert "array.json: row 0: no field `text`" in message
    with pytest.raises(DataError, match=r"one.json` holds one object of JSON and no rows; write"):
        read(tmp_path / "one.json")


def test_a_broken_array_names_the_row(tmp_path: Path):
    (tmp_path / "rows.json").write_text('[{"text": "a"}, {"text": ', encoding="utf-8")
    assert read(tmp_path / "rows.json")[0] == "a"
    assert "row 1: not JSON" in read(tmp_path / "rows.json")[1]


def test_conversations_in_an_array_are_read_and_other_files_of_the_folder_named(tmp_path: Path):
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(3)]
    (tmp_path / "chats.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "about.json").write_text('[{"name": "x"}]', encoding="utf-8")
    (tmp_path / "README.md").write_text("About these", encoding="utf-8")
    template = ChatRows(find_chat_template("byte", "plain"))
    corpus = find_corpus(str(tmp_path)).tables(template)
    assert [file.name for file in corpus.files] == ["chats.json"]
    assert corpus.note == f"2 files of `{tmp_path}` not read: `README.md`, `about.json`"


def test_a_program_of_a_folder_that_is_one_object_stays_a_text(tmp_path: Path):
    package = json.dumps({"name": "x", "scripts": {"test": "y"}}, indent=1)
    (tmp_path / "package.json").write_text(package, encoding="utf-8")
    (tmp_path / "main.js").write_text("run()", encoding="utf-8")
    assert read(tmp_path) == ["run()", package]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda content: pa.compress(content, codec="zstd", asbytes=True)),
    ],
)
def test_compressed_text_is_read_as_what_it_holds(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
):
    (tmp_path / f"rows.jsonl{suffix}").write_bytes(compress(LINES.encode()))
    (tmp_path / f"words.txt{suffix}").write_bytes(compress(b"some words"))
    assert read(tmp_path) == [*TEXTS, "some words"]

    whole = compress(b"many words " * 999)
    (tmp_path / f"words.txt{suffix}").write_bytes(whole[: len(whole) // 2])
    assert "words.txt" in read(tmp_path)[-1]
    assert "cannot be read: " in read(tmp_path)[-1]


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("words\N{BYTE ORDER MARK}", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text(LINES, encoding="utf-8-sig")
    (tmp_path / "c.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    assert read(tmp_path) == ["words\N{BYTE ORDER MARK}", *TEXTS, *TEXTS]


def test_arrow_files_are_read_in_both_forms(tmp_path: Path):
    table = pa.table({"text": ["a", "b"]})
    for name, writer in {"stream": ipc.new_stream, "file": ipc.new_file}.items():
        with writer(str(tmp_path / f"{name}.arrow"), table.schema) as sink:
            sink.write_table(table)
        assert read(tmp_path / f"{name}.arrow") == ["a", "b"]
    (tmp_path / "none.arrow").write_bytes(b"ARROW1 and no more")
    assert "none.arrow` is not an Arrow file" in read(tmp_path / "none.arrow")[0]


def test_a_folder_names_the_files_that_it_leaves_out(tmp_path: Path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n:02}.txt").write_text(f"text {n}", encoding="utf-8")
    (folder / "empty.bin").write_bytes(b"")
    assert find_corpus(str(folder)).note is None
    for n in range(7):
        (folder / f"{n}.pdf").write_bytes(b"%PDF\0")
    data = DataRequest(source=str(folder), tokenizer="byte")
    note = f"7 files of `{folder}` not read: `0.pdf`, `1.pdf`, `2.pdf`, `3.pdf`, `4.pdf` and 2 more"
    for _ in range(2):  # prepared, and from the cache
        assert prepare_dataset(data, cache=tmp_path / "cache").notes == (note,)


def test_reading_never_ends_in_another_error(tmp_path: Path):
    (tmp_path / "deep.json").write_text("[" * 9 + "{" * 9999, encoding="utf-8")
    (tmp_path / "bytes.json").write_bytes(b'[{"text": "\xff"}]')
    items = [
        item
        for name in ("deep.json", "bytes.json")
        for item in find_corpus(str(tmp_path / name)).documents(
            rows=TextRows("text"), limit_bytes=None
        )
    ]
    assert isinstance(items[-1], UnreadableDocument)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
def test_text_is_read_in_the_encoding_that_its_mark_says(tmp_path: Path, encoding: str):
    mark = "\N{BYTE ORDER MARK}" if encoding == "utf-16-be" else ""
    (tmp_path / "a.txt").write_text(f"{mark}caf\u00e9 \U0001f642\n", encoding=encoding)
    (tmp_path / "b.jsonl").write_text(mark + LINES, encoding=encoding)
    (tmp_path / "c.csv").write_text(f"{mark}text\nwords\n", encoding=encoding)
    assert read(tmp_path) == ["caf\u00e9 \U0001f642\n", *TEXTS, "words"]


def test_a_file_of_two_encodings_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("words".encode("utf-16") + b"\x00\xd8more")
    (message,) = read(tmp_path / "a.txt")
    assert "a.txt` cannot be read: its mark says UTF-16, and a part of it is none" in message


def test_a_table_with_commas_is_read_by_its_names_and_another_one_as_text(tmp_path: Path):
    (tmp_path / "a.csv").write_text('id,text\n1,"one, ""two""\nthree"\n2,four\n', encoding="utf-8")
    (tmp_path / "b.csv").write_text("id,name\n1,x\n", encoding="utf-8")
    (tmp_path / "c.tsv").write_text("text\tid\nfive\t5\n", encoding="utf-8")
    assert read(tmp_path) == ['one, "two"\nthree', "four", "id,name\n1,x\n", "five"]
    (tmp_path / "a.csv").write_text("id,text\n1,a\n2\n", encoding="utf-8")
    assert "a.csv: row 1: it has another number of values" in read(tmp_path / "a.csv")[1]


def test_a_conversation_means_the_same_in_every_format(tmp_path: Path):
    """Tables write a null for each field that an object of theirs does not have."""
    import datasets

    def row(arguments: dict[str, object]) -> dict[str, object]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[dict[str, object]] = [
            {"role": "user", "content": 'a \u00e9, "b"\n'},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "1", "name": "f"},
            {"role": "assistant", "content": "c"},
        ]
        return {"messages": turns}

    rows = [row({"x": 1}), row({"y": "z"}), row({"x": 2, "deep": {"q": [1]}})]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    texts = [{"messages": json.dumps(row["messages"])} for row in rows]
    datasets.Dataset.from_list(texts).to_csv(tmp_path / "a.csv")
    template = ChatRows(find_chat_template("byte", "plain"))
    names = ("a.jsonl", "a.json", "a.parquet", "saved", "a.csv")
    readings = {name: read(tmp_path / name, template) for name in names}
    assert "null" not in readings["a.jsonl"][0]
    assert readings == dict.fromkeys(names, readings["a.jsonl"])
