"""`windlass VERB ...`: finds the verb, runs it, and turns errors into one message and a code.

Exit codes: 0 good, 1 a run that is broken, 2 your input or the machine under it, 3 our bug,
130 stopped by hand.
"""

import sys

from cyclopts import App, CycloptsError

from windlass.cli.console import error_console, print_error
from windlass.errors import WindlassError

app = App(
    name="windlass",
    help="Train a large model on whatever machine you have: planned, predicted, run, recorded.",
    version_flags=["--version"],
)

_VERBS = {
    "train": "train:train",
    "resume": "train:resume",
    "launch": "launch:launch",
    "sample": "generate:sample",
    "plan": "plan:plan",
    "fit": "plan:fit",
    "compare": "compare:compare",
    "batch": "compare:batch",
    "needed": "smallest_machine:needed",
    "runs": "runs:runs",
    "show": "runs:show",
    "report": "runs:report",
    "models": "machines:models",
    "machines": "machines:machines",
    "probe": "machines:probe",
    "check": "check:check",
    "rehearse": "rehearse:rehearse",
    "record": "largest_model:record",
    "validate": "validate:validate",
}
"""Verb -> where its function is; imported when asked for, listed in this order."""

for turn, (verb, place) in enumerate(_VERBS.items()):
    app.command(f"windlass.cli.commands.{place}", name=verb, sort_key=turn)
app.command("windlass.cli.commands.rank:device", name="device", show=False)


def main(tokens: list[str] | None = None) -> None:
    """Runs one command line and exits with its code."""
    try:
        _name_verbs(sys.argv[1:] if tokens is None else tokens)
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except WindlassError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except CycloptsError as error:
        print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        print_error("stopped by hand")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left (`windlass runs | head`); there is nobody to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception:  # noqa: BLE001  whatever is left is our own slip, told with its trace
        error_console.print_exception()
        print_error("this is a bug of ours; please report the trace above")
        sys.exit(3)


def _name_verbs(tokens: list[str]) -> None:
    """The list of verbs tells what each is for, in the words of its function: imports them."""
    if not tokens or tokens[0] in app.help_flags:
        for verb in _VERBS:
            app[verb]
