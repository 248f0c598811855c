"""Questions are asked as the conversations of a run begin, or the difference is said."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.errors import RequestError
from windlass.inference.text_samples import usual_system_prompt
from windlass.tracking import RunRecord

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
COUNTS = {"role": "system", "content": "You count."}


def conversations(*rows: Mapping[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(*turns: Mapping[str, str]) -> Mapping[str, object]:
    return {"messages": list(turns)}


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run on conversations of which most begin with one system prompt."""
    folder = tmp_path_factory.mktemp("chat")
    asked, bare = chat(COUNTS, QUESTION, ANSWER), chat(QUESTION, ANSWER)
    (folder / "chats.jsonl").write_text(conversations(*[asked] * 30, *[bare] * 10))
    words = (*TINY, f"data.source={folder / 'chats.jsonl'}", "data.format=chat", "train.steps=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        list(windlass.train(*words, "train.sequence=80", root=folder / "runs"))
    return windlass.load("last", root=folder / "runs")


def answer(run: RunRecord, system: str | None) -> str:
    return "".join(windlass.sample(run.folder, "2 + 2?", chat=True, system=system, tokens=20))


def test_a_question_is_asked_with_the_system_prompt_that_most_conversations_have(
    run: RunRecord,
) -> None:
    system, note = usual_system_prompt(run.meta)

    assert system == "You count."
    assert note is not None
    assert "conversations: 'You count.'; `--system TEXT` takes another" in note
    assert answer(run, None) == answer(run, "You count.")
    assert answer(run, None) != answer(run, "")
    with pytest.raises(RequestError, match="ask it by `--chat`"):
        next(windlass.sample(run.folder, "2 + 2?", system="You count."))


def test_a_run_on_conversations_writes_an_answer_in_their_template(run: RunRecord) -> None:
    from windlass.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run.folder / "tokenizer.json")
    question = tokenizer.decode(run.meta["first_question"])

    assert question.startswith("You count.") or "2 + 2?" in question
    assert "4" not in question


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"with_system": 5}, "begin with several; name one by `--system TEXT`"),
        ({"untemplated": 30}, "leave `--chat` out to ask as it has learned"),
        ({"system": ""}, None),
        ({"system": 7}, None),
    ],
)
def test_what_differs_from_the_conversations_of_a_run_is_said(
    prompts: Mapping[str, object], words: str | None
) -> None:
    known = {"conversations": 40, "untemplated": 0, "system": "You count.", "with_system": 30}
    system, note = usual_system_prompt({"prompts": {**known, **prompts}})
    assert system == ""
    assert (note is None) if words is None else (words in str(note))


def test_prompts_and_completions_are_counted_as_what_no_template_surrounds(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.jobs.data import prepare_tokens

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    rows: Sequence[Mapping[str, object]] = [
        {"prompt": f"{n} + 1 = ", "completion": f"{n + 1}"} for n in range(30)
    ]
    (tmp_path / "sums.jsonl").write_text(conversations(*rows))
    words = (f"data.source={tmp_path / 'sums.jsonl'}", "data.format=chat", "data.tokenizer=byte")
    meta = prepare_tokens(windlass.make_request("gpt-tiny", *words), None).meta
    assert meta.prompts is not None
    assert meta.prompts.untemplated == meta.prompts.conversations == meta.train.documents
