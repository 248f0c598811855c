"""The verdict and the first mismatch of a verification in words."""

import pytest

from windlass.report.terminal.verification_table import describe_mismatch, describe_verdict
from windlass.schema.answers.verification import Mismatch, QuantityComparison, VerificationResult


def result(first: Mismatch | None) -> VerificationResult:
    comparisons = (
        QuantityComparison(quantity="loss", count=3, error=1e-7, tolerance=1e-5),
        QuantityComparison(quantity="weight", count=9, error=2e-7, tolerance=1e-2),
    )
    return VerificationResult(steps=3, comparisons=comparisons, first_mismatch=first)


def test_the_verdict_names_the_error_nearest_to_its_tolerance() -> None:
    assert describe_verdict(result(None)) == (
        "equal to one device over 3 steps: largest error 1.0e-07 (loss), tolerance 1e-05"
    )


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            Mismatch(
                step=2, quantity="output", error=0.016, layer=3, layer_name="block2", sample=4
            ),
            "output of layer 3, block2, for sample 4 by 1.6e-02 of its norm",
        ),
        (
            Mismatch(
                step=1,
                quantity="weight gradient",
                error=1.0,
                layer=0,
                layer_name="first",
                weight="first.table",
            ),
            "weight gradient of layer 0, first, `first.table` by 1.0e+00 of its largest value",
        ),
        (
            Mismatch(step=1, quantity="samples", error=float("inf"), sample=4),
            "sample 4 was not taken, or was taken where it should not be",
        ),
        (Mismatch(step=3, quantity="loss", error=0.5), "loss by 5.0e-01 of its value"),
    ],
)
def test_a_mismatch_is_described_with_its_place(first: Mismatch, words: str) -> None:
    assert describe_mismatch(first) == words
    assert (
        describe_verdict(result(first)) == f"NOT EQUAL to one device in step {first.step}: {words}"
    )
