"""Proofs on the terminal: what was compared, where runs part, which mistakes were found."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.table import Table

from windlass.schema.verification import (
    ComparedQuantity,
    Mismatch,
    QuantityComparison,
    VerificationResult,
)

_OVER: dict[ComparedQuantity, str] = {
    "output": "of its norm",
    "input gradient": "of its norm",
    "weight gradient": "of its largest value",
    "weight": "of its largest value",
}
"""What an error is a share of; of single numbers, of the number itself."""


class InjectedFault(NamedTuple):
    """One that was made on purpose."""

    description: str
    layer: int | None
    """That made it."""
    proof: VerificationResult
    detected: bool


def describe_verdict(proof: VerificationResult) -> str:
    """`equal to one device over 3 steps: largest error 6e-16, 1e-09 allowed`."""
    steps = f"{proof.steps} step{'s' if proof.steps > 1 else ''}"
    if proof.first_mismatch is not None:
        return f"NOT EQUAL in step {proof.first_mismatch.step}: {describe_difference(proof.first_mismatch)}"
    worst = max(proof.comparisons, key=lambda each: each.error / (each.tolerance or math.inf))
    return (
        f"equal to one device over {steps}: largest error {worst.error:.1e} ({worst.quantity}), "
        f"{worst.tolerance:.0e} allowed"
    )


def describe_difference(first: Mismatch) -> str:
    """`output of layer 3, block2, for sample 4 by 1.6e-02 of its norm`."""
    if first.quantity == "samples":
        return f"sample {first.sample} was not taken, or taken where it should not be"
    where = "" if first.layer is None else f" of layer {first.layer}, {first.layer_name}"
    if first.weight is not None:
        where += f", `{first.weight}`"
    if first.sample is not None:
        where += f", for sample {first.sample}"
    over = _OVER.get(first.quantity, "of it")
    apart = f"by {first.error:.1e} {over}" if math.isfinite(first.error) else "has no such number"
    return f"{first.quantity}{where} {apart}"


def verification_table(proof: VerificationResult) -> Table:
    """One row for each kind of thing that was compared."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("compared", "how many", "largest error", "allowed", ""):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    table.columns[0].justify = "left"
    for each in proof.comparisons:
        table.add_row(each.quantity, str(each.count), *_errors(each))
    return table


def injected_faults_table(mistakes: Iterable[InjectedFault]) -> Table:
    """One row for each mistake that was made on purpose."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("made on purpose", "layer", "found", "where"):
        table.add_column(head, overflow="fold")
    for each in mistakes:
        first = each.proof.first_mismatch
        where = "" if first is None else f"step {first.step}: {describe_difference(first)}"
        layer = "" if each.layer is None else str(each.layer)
        table.add_row(each.description, layer, "yes" if each.detected else "[bold red]NO[/]", where)
    return table


def _errors(each: QuantityComparison) -> tuple[str, str, str]:
    if each.quantity == "samples":
        return ("none missing" if each.within_tolerance else "strays", "none", _sign(each))
    return (f"{each.error:.1e}", f"{each.tolerance:.0e}", _sign(each))


def _sign(each: QuantityComparison) -> str:
    return "equal" if each.within_tolerance else "[bold red]NOT EQUAL[/]"
