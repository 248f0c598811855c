from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from made_text import words
from tokenizers import (
    Regex,
    Tokenizer as Core,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from windlass.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    byte_tokenizer,
    encode_in_time,
    load_tokenizer,
    train_tokenizer,
)
from windlass.errors import DataError

BYTE = byte_tokenizer()
TRAINED = train_tokenizer([words(500, seed) for seed in range(8)], 400)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE, TRAINED], ids=["byte", "trained"])


@BOTH
@given(text=st.text())
def test_decoding_gives_back_any_text(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@BOTH
@given(texts=st.lists(st.text(), max_size=5))
def test_a_batch_is_encoded_like_each_text_alone(tokenizer: Tokenizer, texts: list[str]):
    together = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    assert together == [tokenizer.encode(text) for text in texts]


@BOTH
@given(text=st.text())
def test_the_bytes_of_tokens_sum_to_those_of_the_text(tokenizer: Tokenizer, text: str):
    by_id = tokenizer.bytes_per_id()
    assert by_id is not None
    assert sum(by_id[index] for index in tokenizer.encode(text)) == len(text.encode())


def test_a_byte_is_its_own_id_and_the_end_of_text_the_next():
    assert BYTE.encode("aé") == [0x61, 0xC3, 0xA9]
    assert (BYTE.vocabulary, BYTE.end_of_text) == (257, 256)


def test_a_byte_tokenizer_of_256_entries_ends_a_text_by_byte_0_also_after_it_was_saved(
    tmp_path: Path,
):
    made = train_tokenizer(["anything"], 256)
    made.save(tmp_path / "tokenizer.json")
    for tokenizer in (made, load_tokenizer(tmp_path / "tokenizer.json")):
        assert (tokenizer.vocabulary, tokenizer.end_of_text) == (256, 0)
        assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
        assert tokenizer.decode([*"aé".encode(), 0]) == "aé"
        lengths = tokenizer.bytes_per_id()
        assert lengths is not None
        assert lengths.tolist() == [0] + [1] * 255


@BOTH
def test_an_id_beyond_the_vocabulary_decodes_to_nothing(tokenizer: Tokenizer):
    assert tokenizer.decode([*tokenizer.encode("word"), tokenizer.vocabulary + 700]) == "word"


@BOTH
def test_text_that_spells_the_end_of_text_does_not_become_one(tokenizer: Tokenizer):
    spelled = f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(spelled)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == spelled


@BOTH
def test_a_saved_tokenizer_is_loaded_equal(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    spelled = f"kato wörd 日本 {END_OF_TEXT} 🙂\n\n  x"
    assert loaded.encode(spelled) == tokenizer.encode(spelled)
    assert (loaded.vocabulary, loaded.end_of_text, loaded.bytewise) == (
        tokenizer.vocabulary,
        tokenizer.end_of_text,
        tokenizer.bytewise,
    )


@BOTH
def test_the_tokenizers_library_reads_the_saved_file_the_same_way(
    tokenizer: Tokenizer, tmp_path: Path
):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    text = "kato wörd 日本\n\n  x"
    assert Core.from_file(str(path)).encode(text).ids == tokenizer.encode(text)


def test_training_twice_gives_the_same_tokenizer():
    texts = [words(500, seed) for seed in range(8)]
    assert train_tokenizer(texts, 400).backend.to_str() == TRAINED.backend.to_str()


def test_a_trained_vocabulary_has_all_bytes_and_the_requested_size():
    assert TRAINED.vocabulary == 400
    assert train_tokenizer(["ab"], 400).vocabulary < 400
    assert len(train_tokenizer(["ab"], 400).encode("\0Ω")) == 3


def foreign(path: Path) -> Path:
    """A tokenizer of lower-case words, as other families have."""
    core = Core(models.Unigram())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.train_from_iterator(
        [words(500, 1)],
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>"),  # noqa: S106  no password
    )
    core.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    return path


@given(text=st.text())
def test_bytes_per_token_sum_to_those_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str
):
    path = tmp_path_factory.getbasetemp() / "foreign.json"
    tokenizer = load_tokenizer(path if path.exists() else foreign(path))
    assert tokenizer.bytes_per_id() is None
    measured = tokenizer.bytes_per_token(text)
    ids = tokenizer.encode(text)
    assert len(measured) == len(ids)
    assert measured.sum() == (len(text.encode()) if ids else 0)


def test_bytes_per_token_agree_with_bytes_per_id():
    text = "kato mi the of 12"
    by_id = TRAINED.bytes_per_id()
    assert by_id is not None
    assert TRAINED.bytes_per_token(text).tolist() == by_id[TRAINED.encode(text)].tolist()


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff\xfe"])
def test_a_file_that_is_not_a_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.json` is not a `tokenizer\.json`"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="no tokenizer file"):
        load_tokenizer(tmp_path / "absent.json")


def test_an_id_that_no_model_has_is_refused_and_takes_no_memory(tmp_path: Path):
    core = Core(models.WordLevel(vocab={"a": 0, "far": 1}, unk_token="a"))  # noqa: S106
    # Its own writer would pass over all ids between.
    text = core.to_str().replace('"far":1', f'"far":{2**31}')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"gives `far` the id 2,147,483,648, and ids go up to"):
        load_tokenizer(tmp_path / "tokenizer.json")


def from_elsewhere(folder: Path, pattern: str) -> Tokenizer:
    """A tokenizer file with a regular expression of its own."""
    core = Core(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(folder / "tokenizer.json")


def test_a_regular_expression_that_gives_up_is_one_sentence(tmp_path: Path):
    tokenizer = from_elsewhere(tmp_path, "(a|aa)+b")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match=r"cannot encode a text: .*; name another one as `data"):
            encode("a" * 60)


def test_a_regular_expression_without_end_is_not_waited_for(tmp_path: Path):
    backend = from_elsewhere(tmp_path, "(a|aa)+b").backend
    with pytest.raises(DataError, match=r"takes more than [0-9.]+ ms for 1 texts; name another"):
        encode_in_time(backend.encode_batch, [("a" * 27 + "c") * 5], seconds=0.01)


def sentencepiece_like() -> Tokenizer:
    """Words that begin with a space which the first one loses, as Llama 2 has them."""
    words = ["▁the", "▁cat", "▁sat", "é", "▁", "!"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = Core(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Tokenizer(backend=core, bytewise=False, vocabulary=len(pieces), end_of_text=0)


@pytest.mark.parametrize(
    ("tokenizer", "lowest"),
    [(BYTE, 0), (TRAINED, 0), (sentencepiece_like(), 257)],
    ids=["byte", "trained", "sentencepiece"],
)
@given(data=st.data())
def test_a_text_that_arrives_is_the_text_decoded_whole(
    tokenizer: Tokenizer, lowest: int, data: st.DataObject
):
    ids = st.lists(st.integers(lowest, tokenizer.vocabulary + 2), max_size=300)
    arriving, prompt = data.draw(ids), data.draw(ids)

    assert "".join(tokenizer.stream_decode(arriving)) == tokenizer.decode(arriving)
    before = tokenizer.decode(prompt).rstrip("\ufffd") if prompt else ""
    together = before + "".join(tokenizer.stream_decode(arriving, prompt))
    assert together == tokenizer.decode([*prompt, *arriving])


def test_a_word_behind_a_prompt_keeps_its_space():
    tokenizer = sentencepiece_like()
    the, cat, sat = (tokenizer.backend.token_to_id(word) for word in ("▁the", "▁cat", "▁sat"))
    accent = [1 + byte for byte in "日".encode()]

    assert list(tokenizer.stream_decode([cat, sat, *accent], [the])) == [" cat", " sat", "日"]
