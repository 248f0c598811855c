"""Delta debugging finds exactly the changes that make a run bad."""

from hypothesis import given, strategies as st

from windlass.judge.delta_debugging import TestResult as Result, find_culprits


@given(st.integers(1, 16), st.data())
def test_every_single_culprit_is_found_in_few_tests(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, count - 1))
    tried: list[tuple[int, ...]] = []

    def run(changes: tuple[int, ...]) -> Result:
        tried.append(changes)
        return "bad" if guilty in changes else "good"

    found = find_culprits(range(count), run, most_tests=50)
    assert found.changes == (guilty,)
    assert found.minimal
    assert found.tests == len(tried) == len(set(tried)) <= 1 + 2 * count.bit_length()


@given(st.integers(2, 12), st.data())
def test_changes_that_are_bad_only_together_are_named_together(
    count: int, data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3))
    found = find_culprits(
        range(count), lambda changes: "bad" if guilty <= set(changes) else "good", most_tests=500
    )
    assert set(found.changes) == guilty
    assert found.minimal


def test_nothing_is_named_if_all_changes_together_are_good() -> None:
    found = find_culprits("abc", lambda _: "good", most_tests=8)
    assert (found.changes, found.tests, found.minimal) == ((), 1, True)


def test_what_is_left_when_the_tests_run_out_is_not_called_minimal() -> None:
    found = find_culprits(
        range(64), lambda changes: "bad" if 7 in changes else "good", most_tests=3
    )
    assert 7 in found.changes
    assert len(found.changes) > 1
    assert not found.minimal


def test_changes_that_do_not_work_apart_stay_together() -> None:
    def run(changes: tuple[str, ...]) -> Result:
        return "unresolved" if ("a" in changes) != ("b" in changes) else "bad"

    found = find_culprits("ab", run, most_tests=8)
    assert found.changes == ("a", "b")
    assert not found.minimal
