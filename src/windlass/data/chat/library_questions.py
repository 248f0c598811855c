"""Conversations about names of the standard library, and a task of names that none of them has."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from windlass.atomic_files import atomic_write
from windlass.data.chat.chat_template import ChatTemplate
from windlass.data.chat.find_template import find_chat_template
from windlass.data.sources import STDLIB, find_corpus
from windlass.data.tasks import Question, save_questions

QUESTIONS_TASK = "library-names"
"""Name of the task."""
_CONVERSATIONS_FILE = "conversations.jsonl"
_DEFINITIONS = {
    "A class.": re.compile(r"^class (\w{3,24})\b", re.MULTILINE),
    "A function.": re.compile(r"^(?:async )?def (\w{3,24})\(", re.MULTILINE),
    "A constant.": re.compile(r"^(\w{3,24}) *(?::[^=\n]+)?=(?!=)", re.MULTILINE),
}
"""Each answer with what defines a name of that kind at the top of a module. A constant has no small
letters; names that are other variables are left out."""
_PRIVACY = ("No, it is private.", "Yes.")
_TRAINED, _ASKED = 400, 40
"""Most names of each kind that conversations have, and that the task has."""


class _Question(NamedTuple):
    """A question with its answers."""

    text: str
    choices: tuple[str, ...]
    answer: int


def save_library_questions(folder: Path) -> tuple[Path, Path]:
    """Writes conversations and a task about names that the standard library defines.

    A name is asked for its kind, and whether it is public. A model can tell from how a name is
    spelt (PEP 8), so that names which it never saw can be answered. Nothing is drawn: the same
    Python gives the same files.

    Args:
        folder: receives `conversations.jsonl`, and the files of the task.

    Returns:
        The conversations, and the task's YAML file, whose contexts have the template `plain`.

    Raises:
        DataError: this Python has no sources of its standard library.
    """
    trained: list[_Question] = []
    asked: list[_Question] = []
    kinds = _names_by_kind()
    for kind in _DEFINITIONS:
        names = kinds[kind]
        asked += [question for name in names[:_ASKED] for question in _questions(name, kind)]
        later = names[_ASKED : _ASKED + _TRAINED]
        trained += [question for name in later for question in _questions(name, kind)]
    template = find_chat_template("bpe", "plain")
    items = tuple(_item(question, template) for question in sorted(asked, key=_order))
    task = save_questions(QUESTIONS_TASK, items, folder)
    lines = [json.dumps(_conversation(question)) for question in sorted(trained, key=_order)]
    conversations = folder / _CONVERSATIONS_FILE
    atomic_write(conversations, "\n".join(lines) + "\n")
    return conversations, task


def _names_by_kind() -> Mapping[str, list[str]]:
    """Names by the answer to what they are, in the order of their hashes; each has one kind."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for file in find_corpus(STDLIB).files:
        text = file.path.read_text("utf-8", errors="replace")
        for kind, pattern in _DEFINITIONS.items():
            for name in pattern.findall(text):
                kinds[name].add(kind)
                if kind == "A constant." and name != name.upper():
                    kinds[name].add("A variable.")
    found: dict[str, list[str]] = {kind: [] for kind in _DEFINITIONS}
    for name in sorted(kinds, key=_hash):
        if len(kinds[name]) == 1:
            found[next(iter(kinds[name]))].append(name)
    return found


def _questions(name: str, kind: str) -> Iterator[_Question]:
    answers = tuple(_DEFINITIONS)
    text = f"Is it a class, a function or a constant: `{name}`?"
    yield _Question(text, answers, answers.index(kind))
    yield _Question(f"Is it public: `{name}`?", _PRIVACY, int(not name.startswith("_")))


def _conversation(question: _Question) -> Mapping[str, object]:
    answer = question.choices[question.answer]
    turns = (("user", question.text), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _item(question: _Question, template: ChatTemplate) -> Question:
    turns = [{"role": "user", "content": question.text}]
    context = template.render(turns, generation_prompt=True).text
    return Question(context, question.choices, question.answer)


def _order(question: _Question) -> str:
    return _hash(question.text)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
