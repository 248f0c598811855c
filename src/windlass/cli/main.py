"""`windlass VERB ...`: finds the verb, runs it, and turns errors into one message and a code.

Exit codes: 0 good, 1 a run that is broken, 2 your input or the machine under it, 3 our bug,
130 stopped by hand.
"""

import sys

from cyclopts import App, CycloptsError

from windlass.cli.console import errors
from windlass.errors import WindlassError

app = App(
    name="windlass",
    help="Train a large model on whatever machine you have: planned, predicted, run, recorded.",
    version_flags=["--version"],
)
for verb, place in {
    "train": "train:train",
    "resume": "train:resume",
    "sample": "sample:sample",
    "plan": "plan:plan",
    "fit": "plan:fit",
    "probe": "machine:probe",
    "machines": "machine:machines",
    "models": "machine:models",
    "validate": "validate:validate",
    "runs": "record:runs",
    "show": "record:show",
    "report": "record:report",
}.items():
    app.command(f"windlass.cli.{place}", name=verb)


def main(tokens: list[str] | None = None) -> None:
    """Runs one command line and exits with its code."""
    try:
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except WindlassError as error:
        errors.print(f"[bold red]windlass:[/] {_plain(error)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except CycloptsError as error:
        errors.print(f"[bold red]windlass:[/] {_plain(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("[bold red]windlass:[/] stopped by hand", highlight=False)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left (`windlass runs | head`); there is nobody to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception:  # noqa: BLE001  whatever is left is our own slip, told with its trace
        errors.print_exception()
        errors.print("[bold red]windlass:[/] this is a bug of ours; please report the trace above")
        sys.exit(3)


def _plain(error: Exception) -> str:
    return str(error).replace("[", r"\[")
