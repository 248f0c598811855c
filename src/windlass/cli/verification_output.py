"""What `check` and `rehearse` print of a proof, and how they end."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from windlass import api
from windlass.cli.console import Report, console, print_bullets, print_json
from windlass.report.formatting import describe_plan
from windlass.report.terminal.verification_table import (
    InjectedFault,
    describe_verdict,
    injected_faults_table,
    verification_table,
)
from windlass.schema.request import Request

VERIFICATION_STEPS = 3
"""Of a proof: one without moments before it, one with, and one more."""


def verify_and_print(
    planned: api.Planned,
    notes: Sequence[str],
    progress: Report,
    *,
    faults: bool,
    as_json: bool,
) -> None:
    """Proves a plan on local processes, prints what came of it, and exits with 1 if it is wrong.

    Args:
        planned: of this machine.
        notes: what was made smaller.
        progress: told what runs.
        faults: whether to make mistakes on purpose too.
        as_json: prints JSON in place of tables.

    Raises:
        WindlassError: a run failed.
    """
    ready = api.verification(planned, steps=_steps(planned.request), keep=_kept(planned.request))
    with tempfile.TemporaryDirectory() as folder:
        checking = api.Verifier(ready, Path(folder), progress)
        proof = checking.verify()
        caught = tuple(checking.inject_faults()) if faults and proof.passed else ()
    found = sum(each.detected for each in caught)
    if as_json:
        print_json(
            {
                "equal": proof.passed, "plan": ready.plan, "changed": tuple(notes), "proof": proof,
                "faults": caught, "found": found,
            }
        )  # fmt: skip
    else:
        console.print(f"[bold]plan[/]  {describe_plan(ready.plan)}", soft_wrap=True)
        if notes:
            console.print("made smaller to be run here, its structure kept")
            print_bullets(notes)
        console.print(verification_table(proof))
        console.print(f"[bold]{describe_verdict(proof)}[/]", soft_wrap=True)
        if caught:
            console.print(injected_faults_table(_mistakes(caught)))
            console.print(f"[bold]{found} of {len(caught)} mistakes found[/]")
            for words, lack in checking.skipped_faults():
                console.print(f"  not made: {words}, which needs {lack}", soft_wrap=True)
    if not proof.passed or found < len(caught):
        sys.exit(1)


def _mistakes(caught: Sequence[api.FaultResult]) -> tuple[InjectedFault, ...]:
    return tuple(
        InjectedFault(each.description, each.layer, each.proof, each.detected) for each in caught
    )


def _steps(request: Request) -> int:
    """As many as the request says, which `check` has made few."""
    return request.train.steps


def _kept(request: Request) -> frozenset[str]:
    """What of the numbers is pinned by the request, and so is proved as it is."""
    named = {key for key in ("precision", "compile") if getattr(request, key) is not None}
    return frozenset(named | ({"moments"} if request.moments != "float32" else set()))
