"""Special tokens are those of a folder's own files, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Core, decoders, models, pre_tokenizers, processors

from windlass.data.chat import encode_documents
from windlass.data.readers import TextDocument
from windlass.data.tokenizer import Tokenizer, load_tokenizer
from windlass.data.tokenizer_folder import converted_tokenizer
from windlass.errors import DataError

NAMES = ("<｜begin｜>", "<｜end▁of▁sentence｜>", "<turn>", "[CLS]", "[SEP]", "[MASK]", "</s>")


def folder_of(
    path: Path,
    *,
    before: tuple[str, ...] = (),
    behind: tuple[str, ...] = (),
    files: dict[str, Any] | None = None,
) -> Path:
    """A folder with a tokenizer of bytes and seven names, and files beside it."""
    path.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate((*NAMES, *letters))}
    core = Core(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, normalized=False) for name in NAMES])
    if before or behind:
        core.post_processor = processors.TemplateProcessing(
            single=" ".join((*before, "$A", *behind)),
            pair="$A $B",
            special_tokens=[(name, NAMES.index(name)) for name in {*before, *behind}],
        )
    core.save(str(path / "tokenizer.json"))
    for name, content in (files or {}).items():
        (path / name).write_text(json.dumps(content))
    return path


def load(path: Path) -> Tokenizer:
    return load_tokenizer(path / "tokenizer.json")


def document_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    document = TextDocument(name="a", text=text, nbytes=len(text.encode()))
    return encode_documents(tokenizer, [document])[0].ids.tolist()


def test_a_text_ends_with_the_token_that_the_folder_names_and_none_is_added(tmp_path: Path):
    named = {"tokenizer_config.json": {"eos_token": NAMES[1]}, "config.json": {"eos_token_id": 1}}
    tokenizer = load(folder_of(tmp_path, files=named))
    assert document_ids(tokenizer, "ab")[-1] == 1
    assert tokenizer.vocabulary == len(NAMES) + 256


def test_a_folder_whose_config_alone_names_the_end_is_read_by_its_id(tmp_path: Path):
    files = {"generation_config.json": {"eos_token_id": [1, 2]}, "config.json": {"eos_token_id": 2}}
    assert load(folder_of(tmp_path / "both", files=files)).end_of_text == 2
    del files["config.json"]
    assert load(folder_of(tmp_path / "one", files=files)).end_of_text == 1


def test_an_end_that_nothing_names_is_refused_rather_than_guessed(tmp_path: Path):
    with pytest.raises(DataError, match=r"nothing says which token of .* ends a text; name it as"):
        load(folder_of(tmp_path))


def test_an_end_that_is_no_token_is_refused_by_name(tmp_path: Path):
    named = {"tokenizer_config.json": {"eos_token": "<absent>"}}
    with pytest.raises(DataError, match="has no `<absent>`, which the files beside it name"):
        load(folder_of(tmp_path, files=named))


def test_a_token_added_under_another_id_than_it_has_is_refused(tmp_path: Path):
    added = {"900": {"content": "<new>", "special": True}}
    files = {"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": added}}
    with pytest.raises(DataError, match=r"`<new>` is token 263 of .* says 900"):
        load(folder_of(tmp_path, files=files))


def test_a_saved_tokenizer_keeps_its_special_tokens(tmp_path: Path):
    files = {"tokenizer_config.json": {"eos_token": "</s>", "mask_token": "[MASK]"}}
    tokenizer = load(folder_of(tmp_path / "theirs", before=("[CLS]",), files=files))
    (tmp_path / "ours").mkdir()
    assert len(tokenizer.save(tmp_path / "ours" / "tokenizer.json")) == 2
    again = load(tmp_path / "ours")
    assert again.special == tokenizer.special
    assert (again.end_of_text, again.mask_token, again.prefix) == (6, 5, (3,))


@settings(max_examples=12)
@given(data=st.data())
def test_ids_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    from transformers import AutoTokenizer

    some = st.lists(st.sampled_from(NAMES[:5]), max_size=2).map(tuple)
    kinds = st.sampled_from(("bos_token", "cls_token", "pad_token", "unk_token"))
    named = data.draw(st.dictionaries(kinds, st.sampled_from(NAMES), max_size=3))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **named}
    if data.draw(st.booleans()):
        config["added_tokens_decoder"] = {"263": {"content": "<new>", "special": True}}
    path = folder_of(
        tmp_path_factory.mktemp("folder"),
        before=data.draw(some),
        behind=data.draw(some),
        files={"tokenizer_config.json": config},
    )
    theirs, ours = AutoTokenizer.from_pretrained(path), load(path)
    text = data.draw(st.text(max_size=20))
    whole = theirs(text)["input_ids"]
    end = [] if whole[-1:] == [6] else [6]
    assert document_ids(ours, text) == whole + end
    behind = len(ours.suffix)
    assert ours.encode_prompt(f"a{text}") == theirs(f"a{text}")["input_ids"][: -behind or None]
    assert (ours.end_of_text, ours.bos_token) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocabulary == len(theirs)
    assert dict(ours.special) == theirs.special_tokens_map


def test_a_vocabulary_in_another_form_is_read_as_by_transformers(tmp_path: Path):
    from transformers import AutoTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*letters, "th", "the", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    path = converted_tokenizer(tmp_path, tmp_path / "cache")
    assert path is not None
    assert converted_tokenizer(tmp_path, tmp_path / "cache") == path
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path)
    assert document_ids(ours, "the cat") == [*theirs("the cat")["input_ids"], 258]
    assert converted_tokenizer(tmp_path / "cache", tmp_path / "cache") is None


def test_a_folder_that_names_none_has_the_special_tokens_of_its_type(tmp_path: Path):
    """As that of `bert-base-uncased`."""
    vocabulary = {t: n for n, t in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"))}
    core = Core(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106  no password
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = load(tmp_path)
    assert (tokenizer.class_token, tokenizer.end_of_text, tokenizer.mask_token) == (2, 3, 4)
    assert document_ids(tokenizer, "cat") == [5, 3]
