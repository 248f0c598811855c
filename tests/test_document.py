"""Documents: files, overrides, errors, copies and fingerprints."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import Field

from windlass.document import Document, format_overrides
from windlass.errors import InputErrors, RequestError, StorageError


class Leaf(Document):
    size: float = 1.0
    words: tuple[str, ...] = ()


class Tree(Document):
    name: str = "oak"
    age: int = Field(default=3, ge=0)
    note: str | None = None
    leaf: Leaf = Leaf()
    leaves: tuple[Leaf, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


leaf = st.builds(
    Leaf, size=st.floats(allow_nan=False), words=st.lists(st.text(), max_size=3).map(tuple)
)
trees = st.builds(
    Tree,
    name=st.text(),
    age=st.integers(0, 2**63 - 1),
    note=st.none() | st.text(),
    leaf=leaf,
    leaves=st.lists(leaf, max_size=3).map(tuple),
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
)


def errors_of(file: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(InputErrors) as caught:
        Tree.resolve(file, overrides)
    return list(caught.value.messages)


@pytest.mark.parametrize("name", ["tree.toml", "tree.json"])
@given(tree=trees)
def test_a_saved_document_is_loaded_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, tree: Tree
):
    path = tmp_path_factory.mktemp("document") / name
    tree.save(path)
    assert Tree.load(path) == tree
    assert Tree.load(path).fingerprint() == tree.fingerprint()


@pytest.mark.parametrize("name", ["leaf.toml", "leaf.json"])
def test_nan_survives_its_file(tmp_path: Path, name: str):
    Leaf(size=math.nan).save(tmp_path / name)
    assert math.isnan(Leaf.load(tmp_path / name).size)


@given(tree=trees, data=st.data())
def test_a_fingerprint_is_independent_of_the_order_of_keys(tree: Tree, data: st.DataObject):
    content = json.loads(tree.to_json())
    shuffled = dict(data.draw(st.permutations(list(content.items()))))
    assert Tree.model_validate(shuffled).fingerprint() == tree.fingerprint()


@given(one=trees, other=trees)
def test_documents_with_one_fingerprint_are_equal(one: Tree, other: Tree):
    assert (one.fingerprint() == other.fingerprint()) == (one.to_json() == other.to_json())


def test_defaults_give_way_to_the_file_and_the_file_to_overrides(tmp_path: Path):
    path = tmp_path / "tree.toml"
    path.write_text('name = "elm"\nage = 5\n[leaf]\nsize = 2\n')
    tree = Tree.resolve(path, ["age=6", "leaf.words=['a']", "age=7"])
    assert tree == Tree(name="elm", age=7, leaf=Leaf(size=2, words=("a",)))


def test_a_bare_word_of_an_override_is_a_string():
    assert Tree.resolve(None, ["name=hf:some/name", "note="]) == Tree(name="hf:some/name", note="")


@given(
    tree=trees, words=st.lists(st.text(st.characters(codec="latin-1", categories="L")), max_size=3)
)
def test_overrides_that_are_written_for_some_values_set_these(tree: Tree, words: list[str]):
    values = {"age": tree.age, "pairs": tree.pairs, "leaf.size": tree.leaf.size}
    known = Tree.resolve(None, format_overrides({**values, "leaf.words": words}))
    assert known == Tree(
        age=tree.age, pairs=tree.pairs, leaf=Leaf(size=tree.leaf.size, words=tuple(words))
    )


def test_truth_is_written_as_requests_have_it():
    assert format_overrides({"compile": False, "packing": True}, "data.") == (
        "data.compile=false", "data.packing=true",
    )  # fmt: skip


def test_all_errors_are_reported_at_once_each_with_its_file_and_line(tmp_path: Path):
    path = tmp_path / "tree.toml"
    path.write_text(
        '# a tree\nnam = "elm"\nage = -1\n\n'
        '[leaf]\nwords = [\n  "a", # = [x]\n  3,\n]\nsize = "x"\n'
    )
    no_number = "input should be a valid number, unable to parse string as a number"
    assert errors_of(path, "leaf.siz=3", "age") == [
        "override `age`: write it as `key=value`",
        f"{path}:3: `age` = -1: input should be greater than or equal to 0",
        f"{path}:10: `leaf.size` = 'x': {no_number}",
        f"{path}:6: `leaf.words.1` = 3: input should be a valid string",
        "override `leaf.siz=3`: unknown key `leaf.siz`; did you mean `leaf.size`?",
        f"{path}:2: unknown key `nam`; did you mean `name`?",
    ]


def test_an_error_in_an_array_of_tables_is_reported_with_its_own_line(tmp_path: Path):
    path = tmp_path / "tree.toml"
    path.write_text(
        "pairs = [\n    [\n        1,\n        2,\n    ],\n]\n[[leaves]]\nsize = 'a'\n"
        "[[leaves]]\nsize = 2\n[[leaves]]\nsiez = 3\n"
    )
    messages = errors_of(path)
    assert messages[0].startswith(f"{path}:8: `leaves.0.size` = 'a'")
    assert messages[1] == f"{path}:12: unknown key `leaves.2.siez`; did you mean `leaves.2.size`?"


@given(tree=trees, keys=st.data())
def test_any_key_of_any_saved_file_is_found_at_its_line(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, keys: st.DataObject
):
    # An independent check: if the key of a line becomes unknown, the error names that line.
    lines = tree.to_toml().split("\n")
    with_size = [number for number, line in enumerate(lines) if line.startswith("size = ")]
    number = keys.draw(st.sampled_from(with_size))
    lines[number] = lines[number].replace("size", "weight", 1)
    path = tmp_path_factory.mktemp("document") / "tree.toml"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    [message] = errors_of(path)
    assert message.startswith(f"{path}:{number + 1}: unknown key")


def test_an_unknown_table_of_an_override_is_reported_for_the_override():
    [message] = errors_of(None, "laef.size=3")
    assert message == "override `laef.size=3`: unknown key `laef`; did you mean `leaf.size`?"


class Nested(Document):
    """A document that may hold others of its kind."""

    size: int = 1
    inner: tuple["Nested", ...] = ()


def test_an_unknown_key_of_a_document_that_holds_its_own_kind_is_refused():
    with pytest.raises(InputErrors, match=r"unknown key `siez`"):
        Nested.resolve(overrides=["siez=1"])


def test_a_plain_value_in_place_of_a_table_is_refused():
    [message] = errors_of(None, "leaf=3")
    assert message == "override `leaf=3`: `leaf` = 3: should be a table of keys"


def test_an_override_below_a_plain_value_is_an_error():
    [message] = errors_of(None, "age=3", "age.years=4")
    assert message == "override `age.years=4`: `age.years` is below a key that is not a table"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", b"age = 3\nage = 4\n", "line 2"),
        ("a.toml", b"\xff\xfe", "cannot be read as text"),
        ("a.json", b'{"age": 3,}', "line 1"),
        ("a.json", b"[1]", "not a table of keys"),
        ("a.json", b"[" * 100_000, "32 deep"),
        ("a.json", b'{"age": ' + b"1" * 5000 + b"}", "4300 digits"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named(
    tmp_path: Path, name: str, content: bytes, reason: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=reason) as caught:
        Tree.load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(RequestError, match=r"no file `nowhere\.toml`"):
        Tree.load(Path("nowhere.toml"))


def test_saving_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        Tree().save(tmp_path / "file" / "tree.toml")


def test_a_copy_replaces_fields_by_their_names():
    assert Tree(name="elm").model_copy(update={"age": 7}) == Tree(name="elm", age=7)


def test_a_copy_with_a_name_that_is_no_field_is_refused():
    with pytest.raises(KeyError, match="Tree has no field hight, nam"):
        Tree().model_copy(update={"nam": "elm", "hight": 2, "age": 7})
