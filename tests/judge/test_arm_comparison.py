"""Arms at equal tokens, FLOP and wall time, and what is said of them."""

import pytest

from windlass.judge.arm_comparison import (
    Arm,
    ArmCurve,
    Band,
    Comparison,
    arm_sentence,
    compare_arms,
    comparison_sentence,
    relation,
)


def made_curve(
    seed: int, losses: list[float], *, flop: float = 2.0, seconds: float = 3.0
) -> ArmCurve:
    """A loss for each hundred tokens, which take some FLOP and seconds each."""
    counts = range(1, len(losses) + 1)
    return ArmCurve(
        seed=seed, steps=tuple(counts), tokens=tuple(100.0 * n for n in counts),
        flop=tuple(flop * n for n in counts), seconds=tuple(seconds * n for n in counts),
        losses=tuple(losses),
    )  # fmt: skip


def made_comparison(**bands: tuple[float, float, float] | None) -> Comparison:
    return Comparison(
        budget="tokens", amount=100.0, seeds=3,
        bands={name.replace("_", "-"): band and Band(*band) for name, band in bands.items()},
    )  # fmt: skip


def test_arms_are_read_where_they_have_used_as_much_as_the_first_one() -> None:
    dense = Arm(name="dense", curves=(made_curve(1, [5, 4]), made_curve(2, [5, 4.2])))
    cheap = made_curve(1, [6, 5, 4.5, 4, 3.5, 3], flop=1.0, seconds=2.0)
    sparse = Arm(name="sparse", curves=(cheap, cheap))

    tokens, flop, seconds = compare_arms([dense, sparse])

    assert (tokens.amount, flop.amount, seconds.amount) == (200, 4, 6)
    assert tokens.bands["sparse"] == (5, 5, 5)
    assert flop.bands["sparse"] == (4, 4, 4)
    assert seconds.bands["sparse"] == (4.5, 4.5, 4.5)
    assert all(one.bands["dense"] == (4, 4.1, 4.2) for one in (tokens, flop, seconds))


def test_a_loss_between_two_evaluations_lies_on_the_line_through_both() -> None:
    curve = made_curve(1, [5, 4])

    assert curve.loss_at("tokens", 150) == 4.5
    assert curve.loss_at("tokens", 50) is None
    assert curve.loss_at("seconds", 7) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 2, 3), (3.1, 4, 5), "better"),
        ((3.1, 4, 5), (1, 2, 3), "worse"),
        ((1, 2, 3), (3, 4, 5), "equal"),
        ((1, 4, 5), (2, 2, 3), "equal"),
    ],
)
def test_bands_that_meet_are_equal_within_noise(
    one: tuple[float, float, float], other: tuple[float, float, float], expected: str
) -> None:
    assert relation(Band(*one), Band(*other)) == expected


TIES = (
    "a is best (1.100); b (1.300) and c (1.400) equal it within the noise of 3 seeds; d is worse "
    "by 7.900."
)
Bands = dict[str, tuple[float, float, float] | None]


@pytest.mark.parametrize(
    ("bands", "sentence"),
    [
        (
            {"dense": (1, 1.1, 1.2), "sparse": (2, 2.1, 2.2), "narrow": (3, 3.1, 3.2)},
            "dense is best (1.100); sparse is worse by 1.000 and narrow by 2.000.",
        ),
        (
            {"dense": (2, 2.1, 2.2), "sparse": (2.1, 2.2, 2.3), "narrow": (1, 1.1, 1.2)},
            "narrow is best (1.100); dense is worse by 1.000 and sparse by 1.100.",
        ),
        (
            {"dense": (2, 2.1, 2.2), "sparse": (2.1, 2.2, 2.3)},
            "dense is best (2.100); sparse (2.200) equals it within the noise of 3 seeds.",
        ),
        (
            {"a": (1, 1.1, 1.5), "b": (1.2, 1.3, 1.4), "c": (1.4, 1.4, 1.6), "d": (9, 9, 9)},
            TIES,
        ),
        (
            {"dense": (1, 1.1, 1.2), "sparse": None},
            "dense is best (1.100); sparse did not come so far.",
        ),
    ],
)
def test_the_sentence_says_who_is_best_who_equals_it_and_who_is_worse(
    bands: Bands, sentence: str
) -> None:
    assert comparison_sentence(made_comparison(**bands)) == f"At equal tokens {sentence}"


def test_a_sentence_on_one_arm_names_wins_ties_and_losses() -> None:
    win = made_comparison(sparse=(1, 1, 1), narrow=(2, 2, 2))
    tie = made_comparison(sparse=(1, 2, 3), narrow=(2, 2, 2))
    loss = made_comparison(sparse=(3, 3, 3), narrow=(2, 2, 2))
    unknown = made_comparison(sparse=None, narrow=(2, 2, 2))

    assert arm_sentence([win, tie], "sparse", "narrow") == (
        "Sparse is better than narrow at equal tokens and equal to narrow within noise at equal "
        "tokens."
    )
    assert arm_sentence([loss, unknown], "sparse", "narrow") == (
        "Sparse is worse than narrow at equal tokens."
    )
    assert arm_sentence([unknown], "sparse", "narrow") == ""
