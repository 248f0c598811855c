"""What `check` and `rehearse` print of a verification, and their exit code."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from windlass import api
from windlass.cli.console import console, print_bullets, print_json
from windlass.report import (
    InjectedFaultRow,
    describe_plan,
    describe_verdict,
    injected_faults_table,
    verification_table,
)
from windlass.schema import Request

VERIFICATION_STEPS = 3
"""Optimizer steps of a verification: the first has no moments yet, the second has, and one more."""


def verify_and_print(
    planned: api.Planned,
    notes: Sequence[str],
    progress: api.Progress,
    *,
    faults: bool,
    as_json: bool,
) -> None:
    """Verifies a plan on local processes, prints the result, and exits with 1 if it failed.

    Args:
        planned: a plan for this machine.
        notes: what was made smaller, a sentence each.
        progress: called with what runs.
        faults: whether to inject faults too, and to check that each is detected.
        as_json: print JSON instead of tables.

    Raises:
        WindlassError: a run failed.
    """
    request = planned.request
    ready = api.verification(planned, steps=request.train.steps, keep=_pinned_numerics(request))
    with tempfile.TemporaryDirectory() as folder:
        verifier = api.Verifier(ready, Path(folder), progress)
        result = verifier.verify()
        injected = tuple(verifier.inject_faults()) if faults and result.passed else ()
    detected = sum(fault.detected for fault in injected)
    if as_json:
        print_json(
            {
                "equal": result.passed, "plan": ready.plan, "changed": tuple(notes),
                "verification": result, "faults": injected, "detected": detected,
            }
        )  # fmt: skip
    else:
        console.print(f"[bold]plan[/]  {describe_plan(ready.plan)}", soft_wrap=True)
        if notes:
            console.print("made smaller to run here, with the same structure")
            print_bullets(notes)
        console.print(verification_table(result))
        console.print(f"[bold]{describe_verdict(result)}[/]", soft_wrap=True)
        if injected:
            console.print(injected_faults_table(_table_rows(injected)))
            console.print(f"[bold]{detected} of {len(injected)} injected faults detected[/]")
            for description, requirement in verifier.skipped_faults():
                console.print(
                    f"  skipped: {description}, which needs {requirement}", soft_wrap=True
                )
    if not result.passed or detected < len(injected):
        sys.exit(1)


def _table_rows(faults: Sequence[api.FaultResult]) -> tuple[InjectedFaultRow, ...]:
    return tuple(
        InjectedFaultRow(fault.description, fault.layer, fault.result, fault.detected)
        for fault in faults
    )


def _pinned_numerics(request: Request) -> frozenset[str]:
    """Keys among precision, moments and compile that the request fixes; they stay as they are."""
    pinned = {key for key in ("precision", "compile") if getattr(request, key) is not None}
    return frozenset(pinned | ({"moments"} if request.moments != "float32" else set()))
