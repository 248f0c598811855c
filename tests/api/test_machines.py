"""A machine of the user's own, asked for question by question."""

from pathlib import Path

import pytest

from windlass import api
from windlass.errors import InputErrors


class Person:
    """Answers each question with the next of its answers for that key, and else takes the default.

    Args:
        answers: how a question begins -> answers in the order in which they are given.
    """

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, question: str) -> str:
        self.asked.append(question)
        asked = question.splitlines()[-1].replace(" ", "_")
        left = next((left for word, left in self.answers.items() if asked.startswith(word)), [])
        return left.pop(0) if left else ""


def test_a_wrong_answer_is_asked_again_and_an_empty_one_takes_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    person = Person(device=["", "h10", "h100"], hosts=["two", "2"], network_cards_in_a_host=["4?"])
    path = api.write_machine("ours", ask=person)
    machine = api.find_machine(str(path))
    assert machine.hosts == 2
    assert machine.links[-1].shared_by == 2
    assert machine.source_of("hosts").how == "published"
    assert machine.source_of("links.network.shared_by").how == "guess"
    assert machine.source_of("devices_per_host").how == "guess"
    assert sum("did you mean `h100`" in question for question in person.asked) == 1
    assert sum("'two' is not a number" in question for question in person.asked) == 1


def test_what_was_given_wrong_is_refused_before_any_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    person = Person()
    with pytest.raises(InputErrors, match="did you mean `hosts`"):
        api.write_machine("ours", "host=3", ask=person)
    assert not person.asked
    assert not list(tmp_path.iterdir())
