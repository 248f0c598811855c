"""Questions made of Python sources."""

import inspect
import json
import textwrap

import pytest

from windlass.data.tasks import code_tasks
from windlass.errors import DataError

TEXTS = [inspect.getsource(module) for module in (json, json.decoder, json.encoder, textwrap)]
TEXTS += [inspect.getsource(inspect)]


def test_the_same_texts_give_the_same_questions() -> None:
    one = code_tasks(TEXTS, items=30, examples=3)

    assert code_tasks(list(TEXTS), items=30, examples=3) == one
    assert [task.name for task in one] == ["next-line", "last-name"]
    assert code_tasks(TEXTS, items=20, examples=3)[0].questions == one[0].questions[:20]


def test_every_right_answer_and_no_wrong_one_continues_its_text() -> None:
    texts = ["".join(text.expandtabs().split()) for text in TEXTS]

    for task in code_tasks(TEXTS, items=30, examples=3):
        for item in (*task.questions, *task.examples):
            assert len(set(item.choices)) == 4
            continued = ["".join((item.context + choice).split()) for choice in item.choices]
            found = [any(each in text for text in texts) for each in continued]
            assert found[item.answer], item


def test_right_answers_stand_everywhere_and_questions_are_asked_once() -> None:
    for task in code_tasks(TEXTS, items=40, examples=3):
        assert {item.answer for item in task.questions} == {0, 1, 2, 3}
        asked = {(item.context, item.choices[item.answer]) for item in task.questions}
        assert len(asked) == 40
        assert not asked & {(one.context, one.choices[one.answer]) for one in task.examples}


def test_choices_are_about_equally_long() -> None:
    for task in code_tasks(TEXTS, items=30, examples=3):
        for item in task.questions:
            lengths = [len(choice.strip()) for choice in item.choices]
            right = lengths[item.answer]
            assert all(abs(n - right) <= 0.35 * max(n, right) for n in lengths)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="needs 34"):
        code_tasks(["def f():\n    return 1\n"], items=30)
