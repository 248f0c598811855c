"""Tasks as files, as tokens, and as scores."""

import json
import math
from pathlib import Path

import pytest

from windlass.data.tasks import (
    ChoiceLikelihood,
    Task,
    TaskItem,
    encode_choices,
    load_task,
    save_task,
    score_choices,
    standard_error,
)
from windlass.data.tokenizer import byte_tokenizer, train_tokenizer
from windlass.errors import InputErrors, RequestError

ITEMS = (
    TaskItem(context="two and two is", choices=(" four", " five"), answer=0),
    TaskItem(context="three and one is", choices=(" nine", " four"), answer=1),
)


def made_task(**changes: object) -> Task:
    return Task(**({"name": "sums", "items": ITEMS, "examples": ITEMS} | changes))


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    task = made_task(shots=2, separator="\n---\n")

    assert load_task(save_task(task, tmp_path)) == task


def test_solved_questions_stand_before_the_question() -> None:
    task = made_task()

    assert task.prompt(ITEMS[1]) == "three and one is"
    assert task.with_shots(1).prompt(ITEMS[1]) == "two and two is four\n\nthree and one is"
    with pytest.raises(RequestError, match="has 2 solved questions, and `shots` = 3"):
        task.with_shots(3)


def likelihoods(*rows: tuple[float, ...]) -> list[list[ChoiceLikelihood]]:
    return [[ChoiceLikelihood(nats, is_greedy=False) for nats in row] for row in rows]


@pytest.mark.parametrize("bytewise", [True, False])
def test_prompt_and_choice_are_tokenized_as_one_text(bytewise: bool) -> None:
    texts = [item.context + item.choices[item.answer] for item in ITEMS] * 20
    tokenizer = byte_tokenizer() if bytewise else train_tokenizer(texts, 300)
    spaced = TaskItem(context="two and two is ", choices=("four", "five"), answer=0)

    for item in (*ITEMS, spaced):
        (choices,) = encode_choices(made_task(items=(item,)), tokenizer)
        for choice, text in zip(choices, item.choices, strict=True):
            assert [*choice.context, *choice.tokens] == tokenizer.encode(item.context + text)
            assert tokenizer.decode(choice.tokens).strip() == text.strip()


def test_a_question_without_a_context_stands_behind_an_end_of_text() -> None:
    item = TaskItem(context="", choices=("a", "b"), answer=0)
    tokenizer = byte_tokenizer()

    (choices,) = encode_choices(made_task(items=(item,)), tokenizer)

    assert choices == [((tokenizer.end_of_text,), (97,)), ((tokenizer.end_of_text,), (98,))]


def test_the_likeliest_choice_is_the_answer_also_per_character() -> None:
    items = (
        TaskItem(context="x", choices=("long answer", "short"), answer=0),
        TaskItem(context="x", choices=("aa", "bb"), answer=1),
    )

    score = score_choices(made_task(items=items), likelihoods((-6.0, -5.0), (-1.0, -1.0)))

    assert score.correct == (False, False)  # the first choice wins a tie
    assert score.correct_normalised == (True, False)
    assert score.accuracy_normalised == 0.5
    assert score.answer_nats == pytest.approx((6.0 + 1.0) / (len("long answer") + len("bb")))
    assert score.bits_per_byte == pytest.approx(score.answer_nats / math.log(2))
    assert score.chance == 0.5


def test_the_standard_error_is_that_of_a_sample() -> None:
    answers = [True] * 30 + [False] * 70

    assert standard_error(answers) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert math.isnan(standard_error([True]))


def test_all_lines_that_are_no_questions_are_named_at_once(tmp_path: Path) -> None:
    path = save_task(made_task(), tmp_path)
    lines = [
        "{",
        json.dumps({"context": "a", "choices": ["b"], "answer": 0}),
        json.dumps({"context": "a", "choices": ["b", "c"], "answer": 2}),
        json.dumps({"context": "a", "choices": ["b", ""], "answer": 0}),
    ]
    (tmp_path / "sums.items.jsonl").write_text("\n".join(lines))

    with pytest.raises(InputErrors) as caught:
        load_task(path)

    one, two, three, four = caught.value.messages
    assert one.startswith(f"{tmp_path / 'sums.items.jsonl'}:1: ")
    assert ":2: " in two
    assert "at least 2" in two
    assert three.endswith("`answer` = 2 with 2 choices, counted from 0")
    assert "a choice is empty" in four


def test_a_task_without_its_questions_is_refused(tmp_path: Path) -> None:
    path = save_task(made_task(), tmp_path)
    (tmp_path / "sums.items.jsonl").unlink()

    with pytest.raises(RequestError, match=r"no file `.*sums\.items\.jsonl`"):
        load_task(path)
