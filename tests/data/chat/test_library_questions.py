"""Conversations and questions about the standard library."""

import ast
import json
import re
from pathlib import Path

import pytest

from windlass.data.chat.chat_rows import ChatRows
from windlass.data.chat.find_template import find_chat_template
from windlass.data.chat.library_questions import save_library_questions
from windlass.data.sources import find_corpus
from windlass.data.tasks.code_tasks import Question

NAME = re.compile(r"`(\w+)`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions")
    save_library_questions(path)
    return path


@pytest.fixture(scope="module")
def questions(folder: Path) -> list[Question]:
    """Those of the task's file, which lm-evaluation-harness reads."""
    task = json.loads((folder / "library-names.yaml").read_text("utf-8"))
    lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text("utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def rows(folder: Path) -> list[dict[str, list[dict[str, str]]]]:
    lines = (folder / "conversations.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def names(texts: list[str]) -> set[str]:
    return {match.group(1) for text in texts if (match := NAME.search(text))}


def test_no_name_of_the_task_is_in_a_conversation(folder: Path, questions: list[Question]) -> None:
    learned = names([row["messages"][0]["content"] for row in rows(folder)])
    asked = names([item.context for item in questions])

    assert len(asked) == 120
    assert len(learned) == 1200
    assert not learned & asked


def test_what_a_name_is_said_to_be_is_what_the_parser_finds(questions: list[Question]) -> None:
    texts = [file.path.read_text("utf-8", errors="replace") for file in find_corpus("stdlib").files]
    for item in [item for item in questions if len(item.choices) == 3][:8]:
        (name,) = names([item.context])
        top = re.compile(rf"^(class |def )?{name}\b", re.MULTILINE)
        defining = [text for text in texts if top.search(text)]
        kinds = [kind_of(node, name) for text in defining for node in ast.parse(text).body]
        assert {kind for kind in kinds if kind} == {item.choices[item.answer]}


def kind_of(statement: ast.stmt, name: str) -> str | None:
    """What a statement at the top of a module makes of a name; None if nothing."""
    if isinstance(statement, ast.ClassDef) and statement.name == name:
        return "A class."
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
        return "A function."
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    named = {each.id for target in targets for each in ast.walk(target) if hasattr(each, "id")}
    return "A constant." if name in named else None


def test_a_question_of_the_task_reads_as_conversations_do_up_to_the_answer(
    folder: Path, questions: list[Question]
) -> None:
    document = ChatRows(find_chat_template("bpe", "plain")).document("a", "a", rows(folder)[0])
    (answer,) = document.targets
    before = NAME.sub("`x`", document.text[: answer.start])

    alike = [item for item in questions if NAME.sub("`x`", item.context) == before]
    assert alike
    assert document.text[answer.start :].startswith(tuple(alike[0].choices))


def test_the_same_python_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    save_library_questions(tmp_path)

    for file in folder.glob("*.jsonl"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
