"""Tables of a verification: compared quantities, the first mismatch, detected faults."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from windlass.schema import ComparedQuantity, Mismatch, QuantityComparison, VerificationResult

_OVER: dict[ComparedQuantity, str] = {
    "output": "of its norm",
    "input gradient": "of its norm",
    "weight gradient": "of its largest value",
    "weight": "of its largest value",
}
"""The denominator of an error; errors of single numbers are relative to the number."""


class InjectedFaultRow(NamedTuple):
    """A fault that was injected to see whether the verification detects it."""

    description: str
    layer: int | None
    """Layer in which it was injected; None if it belongs to no layer."""
    result: VerificationResult
    detected: bool


def describe_verdict(result: VerificationResult, reference: str = "one device") -> str:
    """`equal to one device over 3 steps: largest error 6e-16 (loss), tolerance 1e-09`."""
    steps = f"{result.steps} step{'s' if result.steps > 1 else ''}"
    mismatch = result.first_mismatch
    if mismatch is not None:
        where = f"to {reference} in step {mismatch.step}"
        return f"NOT EQUAL {where}: {describe_mismatch(mismatch)}"
    if not any(item.tolerance for item in result.comparisons):
        return f"equal to {reference} bit for bit over {steps}"
    worst = max(result.comparisons, key=lambda item: item.error / (item.tolerance or math.inf))
    return (
        f"equal to {reference} over {steps}: largest error {worst.error:.1e} ({worst.quantity}), "
        f"tolerance {worst.tolerance:.0e}"
    )


def describe_mismatch(first: Mismatch) -> str:
    """`output of layer 3, block2, for sample 4 by 1.6e-02 of its norm`."""
    if first.quantity == "samples":
        return f"sample {first.sample} was not taken, or was taken where it should not be"
    if first.quantity == "tokens":
        return f"sample {first.sample} has other tokens than the order of the data says"
    if first.quantity == "documents":
        return "documents begin elsewhere in their rows than the order of the data says"
    if first.quantity == "expert load":
        return "experts took other tokens, or dropped others"
    if first.quantity == "evaluations":
        return "there is an evaluation that the schedule does not have"
    where = "" if first.layer is None else f" of layer {first.layer}, {first.layer_name}"
    if first.weight is not None:
        where += f", `{first.weight}`"
    if first.sample is not None:
        where += f", for sample {first.sample}"
    over = _OVER.get(first.quantity, "of its value")
    size = f"by {first.error:.1e} {over}" if math.isfinite(first.error) else "is not finite"
    return f"{first.quantity}{where} {size}"


def verification_table(result: VerificationResult) -> Table:
    """One row for each compared quantity."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("compared", "count", "largest error", "tolerance", ""):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    table.columns[0].justify = "left"
    for comparison in result.comparisons:
        table.add_row(comparison.quantity, str(comparison.count), *_errors(comparison))
    return table


def injected_faults_table(faults: Iterable[InjectedFaultRow]) -> Table:
    """One row for each injected fault."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("injected fault", "layer", "detected", "where"):
        table.add_column(head, overflow="fold")
    for fault in faults:
        first = fault.result.first_mismatch
        where = "" if first is None else f"step {first.step}: {describe_mismatch(first)}"
        layer = "" if fault.layer is None else str(fault.layer)
        table.add_row(
            fault.description,
            layer,
            "yes" if fault.detected else Text("NO", style="bold red"),
            where,
        )
    return table


def _errors(comparison: QuantityComparison) -> tuple[str, str, Text]:
    sign = _sign(comparison)
    if comparison.quantity == "samples":
        return ("none missing" if comparison.within_tolerance else "some missing", "none", sign)
    if comparison.quantity in ("tokens", "documents", "evaluations", "expert load"):
        return ("none differ" if comparison.within_tolerance else "some differ", "none", sign)
    if not comparison.tolerance:
        return (f"{comparison.error:.1e}" if comparison.error else "none", "none", sign)
    return (f"{comparison.error:.1e}", f"{comparison.tolerance:.0e}", sign)


def _sign(comparison: QuantityComparison) -> Text:
    return Text("equal") if comparison.within_tolerance else Text("NOT EQUAL", style="bold red")
