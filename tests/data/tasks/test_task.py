"""Tasks as files, as tokens, and as scores."""

import json
import math
import statistics
from pathlib import Path

import pytest

from windlass.data.tasks import (
    ChoiceLikelihood,
    TargetItem,
    Task,
    TaskItem,
    TextItem,
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


def test_a_target_is_right_if_each_of_its_tokens_is_the_likeliest() -> None:
    items = (TargetItem(context="a", target="bc"), TargetItem(context="a", target="é"))
    task = Task(name="targets", items=items, output_type="loglikelihood")

    score = score_choices(
        task, [[ChoiceLikelihood(-1.0, is_greedy=True)], [ChoiceLikelihood(-3.0, is_greedy=False)]]
    )

    found = {metric.name: metric for metric in score.metrics}
    assert found["acc"].value == 0.5
    assert found["perplexity"].value == pytest.approx(math.exp(2.0))
    assert found["bits_per_byte"].value == pytest.approx(4 / 4 / math.log(2))
    # Half of all pairs that are drawn from two are equal; the others have their mean.
    means = [1.0, 2.0, 2.0, 3.0]
    spread = statistics.pstdev(map(math.exp, means))
    assert found["perplexity"].standard_error == pytest.approx(spread, rel=0.01)


@pytest.mark.parametrize("longest", [None, 1, 3, 4, 100])
def test_the_windows_of_a_text_predict_each_of_its_tokens_once(longest: int | None) -> None:
    text, tokenizer = "ten tokens", byte_tokenizer()
    task = Task(name="texts", items=(TextItem(text=text),), output_type="loglikelihood_rolling")

    (windows,) = encode_choices(task, tokenizer, longest)

    assert [token for window in windows for token in window.tokens] == list(text.encode())
    assert windows[0].context == (tokenizer.end_of_text,)
    row = [tokenizer.end_of_text, *text.encode()]
    for window in windows:
        read = [*window.context, *window.tokens]
        assert longest is None or len(read) <= longest + 1
        assert any(row[at : at + len(read)] == read for at in range(len(row)))
    assert longest is None or len(windows) == math.ceil(len(text) / longest)


def test_a_text_is_as_likely_as_its_windows_together() -> None:
    task = Task(name="texts", items=(TextItem(text="two words"),),
                output_type="loglikelihood_rolling")  # fmt: skip

    score = score_choices(task, likelihoods((-2.0, -4.0)))

    values = {metric.name: metric.value for metric in score.metrics}
    assert values["word_perplexity"] == pytest.approx(math.exp(6 / 2))
    assert values["byte_perplexity"] == pytest.approx(math.exp(6 / 9))
    assert values["bits_per_byte"] == pytest.approx(6 / 9 / math.log(2))


def test_nothing_stands_before_a_whole_text() -> None:
    task = Task(name="texts", items=(TextItem(text="a"),), output_type="loglikelihood_rolling")

    with pytest.raises(RequestError, match="whole texts, which nothing stands before"):
        task.with_shots(1)


def test_what_stands_before_a_choice_does_not_count_in_its_length() -> None:
    items = (TaskItem(context="x is", choices=("a", "bcd"), answer=0),)
    task = Task(name="t", items=items, examples=items, shots=1, target_delimiter=" = ")

    ((first, second),) = encode_choices(task, byte_tokenizer())
    score = score_choices(task, likelihoods((-2.0, -5.9)))

    assert bytes(first.context).decode() == "x is = a\n\nx is"
    assert (bytes(first.tokens), bytes(second.tokens)) == (b" = a", b" = bcd")
    assert score.correct_normalised == (False,)


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
