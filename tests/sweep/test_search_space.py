"""The space of a sweep: ranges and choices as a user writes them."""

import pytest

from windlass.errors import RequestError
from windlass.sweep.search_space import (
    end_points,
    grid_point,
    grid_points,
    is_range_or_choices,
    parse_dimension,
)


def test_a_range_of_whole_numbers_has_each_of_them() -> None:
    dimension = parse_dimension("train.seed", "1..5")

    assert (dimension.kind, dimension.choices) == ("int", (1, 2, 3, 4, 5))
    assert parse_dimension("model.width", "16..64:step=16").choices == (16, 32, 48, 64)


def test_a_logarithmic_range_is_divided_by_equal_ratios() -> None:
    dimension = parse_dimension("train.learning_rate", "1e-4..1e-2:log:points=3")

    assert (dimension.kind, dimension.log) == ("float", True)
    assert dimension.choices == (1e-4, 1e-3, 1e-2)
    assert dimension.position(1e-3) == pytest.approx(0.5)


def test_choices_are_values_of_toml_or_words() -> None:
    assert parse_dimension("x", "1,2.5,true,adamw").choices == (1, 2.5, True, "adamw")
    assert parse_dimension("x", [[0.9, 0.95], [0.9, 0.99]]).choices == ((0.9, 0.95), (0.9, 0.99))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("1e-4..1e-2:log", True), ("1..5", True), ("a,b", True), ("[0.9,0.95]", False),
        ("../text", False), ("8x8", False), ("0.001", False),
    ],
)  # fmt: skip
def test_a_range_is_told_from_one_value(text: str, is_one: bool) -> None:
    assert is_range_or_choices(text) == is_one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5..1", "lower end 5 is above the upper end 1"),
        ("0..1e-2:log", "starts above 0"),
        ("0.1..0.5:step=2", "only a range of whole numbers"),
        ("1..5:logg", "`:logg` means nothing"),
        ("1..2:points=1", "2 to 10000 points"),
        ("1..9e999", "finite"),
        ("a,a", "each of them once"),
        ("a,,b", "one choice is empty"),
        ("hello", "is no range"),
    ],
)
def test_a_range_that_is_none_is_refused_with_the_way_out(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_dimension("key", text)


def test_a_grid_has_each_combination_once() -> None:
    space = [parse_dimension("a", "1..3"), parse_dimension("b", "x,y")]

    points = [tuple(grid_point(space, number).values()) for number in range(grid_points(space))]

    assert points == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "x"), (3, "y")]


def test_the_end_points_have_both_ends_and_all_choices() -> None:
    space = [parse_dimension("a", "0.5..8.0"), parse_dimension("b", "x,y,z")]

    points = list(end_points(space))

    assert {point["a"] for point in points} == {0.5, 8.0}
    assert {point["b"] for point in points} == {"x", "y", "z"}
    assert len(points) == 4
