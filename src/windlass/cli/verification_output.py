"""What `check` and `rehearse` print of a verification, and their exit code."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from windlass import api
from windlass.cli.console import console, print_bullets, print_json
from windlass.report import (
    InjectedFaultRow,
    describe_plan,
    describe_verdict,
    injected_faults_table,
    verification_table,
)


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
    ready = api.verified_numerics(planned, steps=request.train.steps)
    with tempfile.TemporaryDirectory() as folder:
        verifier = api.Verifier(ready, Path(folder), progress)
        if faults:
            verifier.require_instructions()
        result = verifier.verify()
        independent = verifier.compare_to_plain_pytorch(planned)
        passed = result.passed and independent.passed
        scope = verifier.scope(planned)
        injected = tuple(verifier.inject_faults()) if faults and passed else ()
    detected = sum(fault.detected for fault in injected)
    if as_json:
        print_json(
            {
                "equal": passed, "plan": ready.plan, "changed": tuple(notes),
                "verification": result, "plain_pytorch": independent, "faults": injected,
                "detected": detected, "events": scope.events, "not_compared": scope.not_compared,
            }
        )  # fmt: skip
    else:
        plan_line = Text.assemble(("plan", "bold"), "  ", describe_plan(ready.plan, ready.graph))
        console.print(plan_line, soft_wrap=True)
        if notes:
            console.print("made smaller to run here, with the same structure")
            print_bullets(notes)
        console.print(verification_table(result))
        console.print(Text(describe_verdict(result), style="bold"), soft_wrap=True)
        console.print(verification_table(independent))
        examples = ready.graph.examples
        data = "a short text" if examples is None else f"a few {examples.noun}"
        reference = f"plain PyTorch in two epochs of {data}"
        verdict = Text(describe_verdict(independent, reference), style="bold")
        console.print(verdict, soft_wrap=True)
        _print_scope(scope)
        if injected:
            console.print(injected_faults_table(_table_rows(injected)))
            console.print(f"{detected} of {len(injected)} injected faults detected", style="bold")
            for description, requirement in verifier.skipped_faults():
                console.print(
                    f"  skipped: {description}, which needs {requirement}", soft_wrap=True
                )
    if not passed or detected < len(injected):
        sys.exit(1)


def _print_scope(scope: api.ProofScope) -> None:
    """Prints which events the compared steps held, and what was not compared."""
    events = ", ".join(f"{name} x{count}" for name, count in scope.events.items())
    console.print(f"in the compared steps: {events}", soft_wrap=True)
    console.print("not compared")
    print_bullets(scope.not_compared)


def _table_rows(faults: Sequence[api.FaultResult]) -> tuple[InjectedFaultRow, ...]:
    return tuple(
        InjectedFaultRow(fault.description, fault.layer, fault.result, fault.detected)
        for fault in faults
    )
