"""`windlass COMMAND ...`: runs a command, and turns an error into one message and an exit code.

Exit codes: 0 good, 1 a run that is broken or that `judge` calls slow or broken, 2 wrong input or a
machine that is too small, 3 a bug of Windlass, 130 interrupted.
"""

import ast
import errno
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cyclopts import (
    App,
    Argument,
    CycloptsError,
    Group,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from windlass.atomic_files import cache_folder
from windlass.cli.console import console, error_console, print_error
from windlass.errors import (
    RequestError,
    RunInterrupted,
    WindlassError,
    describe_limit,
    did_you_mean,
    did_you_mean_any,
    is_text,
    require_addresses,
    shorten,
)

_COMMANDS = {
    "Train": {
        "train": "train:train",
        "resume": "train:resume",
        "launch": "launch:launch",
        "sweep": "record.sweep:app",
        "recipe": "recipe:recipe",
        "sample": "record.sample:sample",
        "chat": "record.sample:chat",
        "evaluate": "inference.task_scores.evaluate",
        "import": "training.imported_run.import_model",
        "export": "launch:export",
    },
    "Plan": {
        "plan": "plan:plan",
        "fit": "plan:fit",
        "data": "data:data",
        "batch": "api.compare.batch",
        "largest-model": "largest_model:largest_model",
        "smallest-machine": "api.smallest_machine.smallest_machines",
        "dataflow": "api.layer_dataflow.dataflow",
    },
    "Prove": {
        "check": "api.proof.check",
        "rehearse": "api.proof.rehearse",
        "validate": "validate:validate",
    },
    "Runs": {
        "runs": "record.runs:app",
        "show": "record.show:show",
        "report": "record.show:report",
        "judge": "record.judge:judge",
        "noise": "judging.seed_noise.noise",
        "diff": "judging.differences.run_diff.diff",
        "bisect": "record.bisect:bisect",
        "serve": "record.serve:serve",
        "merge": "api.stores.merge_runs",
        "sync": "record.store:sync",
        "mirror": "api.exchange.mirror",
        "import-runs": "api.exchange.import_runs",
        "adopt": "api.engines.adoption.adopt",
    },
    "Names and machines": {
        "keys": "api.names.keys",
        "models": "api.names.models",
        "machines": "machines:app",
        "stacks": "api.names.stacks",
        "probe": "jobs.known_machines.probe",
        "doctor": "doctor:doctor",
    },
}
"""Command -> its function, imported when it is called, under the headings of the help."""


_HELP = """Train a large model on whatever machine you have: planned, predicted, run, recorded.

Begin with: windlass train gpt-tiny. What a command takes: windlass COMMAND --help."""


def _new_app(*, is_listing: bool = False) -> App:
    """All commands, which are imported when they are called.

    Args:
        is_listing: whether it only shows its own help, which then imports no command.
    """
    made = App(
        name="windlass",
        help=_HELP,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,
        console=console,
        # `--help` and `--version`, below all commands.
        group_commands=Group("Options", sort_key=len(_COMMANDS)) if is_listing else None,
        group_parameters=Group.create_default_parameters("Options"),
        # What else there is loads a parser of Markdown.
        help_format="plaintext" if is_listing else None,
    )
    for order, (heading, commands) in enumerate(_COMMANDS.items()):
        group = Group(heading, sort_key=order)
        for position, (command, place) in enumerate(commands.items()):
            path = _path(place)
            summary = _summary(place) if is_listing else None
            made.command(path, name=command, help=summary, sort_key=position, group=group)
    made.command("windlass.cli.commands.rank:rank", name="rank", show=False)
    made.command("windlass.cli.commands.rank:rank_server", name="rank-server", show=False)
    made.command("windlass.cli.commands.rank:host", name="host", show=False)
    return made


def _path(place: str) -> str:
    """Where a command is: a function of the interface is made one when it is called."""
    is_function = ":" not in place
    return f"windlass.cli.command:{place}" if is_function else f"windlass.cli.commands.{place}"


def _summary(place: str) -> str:
    """The first line on a command, read from its file: to import them all takes two seconds."""
    module, _, name = _path(place).replace("cli.command:", "").replace(":", ".").rpartition(".")
    file = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        # An `App` has a `help` of its own, or says what its default command does.
        if name == "app" and isinstance(node, ast.keyword) and node.arg == "help":
            return str(ast.literal_eval(node.value))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (
            name == node.name or f"{name}.default" in map(ast.unparse, node.decorator_list)
        ):
            return (ast.get_docstring(node) or "").partition("\n")[0].replace("`", "")
    raise LookupError(f"`{file}` has no `{name}`")


app = _new_app()
"""The command line; tests and documentation read it too."""


_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPIN_COUNT = "1000"
"""Turns for which a thread of OpenMP looks for work before it sleeps; the default is 300,000. A
thread that spins beside other processes keeps the core from the thread that it waits for."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_ALLOCATOR = "expandable_segments:True"
"""Lets torch's allocator of an accelerator grow its segments, so that memory that was freed serves
tensors of other sizes. Without it phases and long pipelines run out of memory that is free."""


_RANKS = {"rank": "", "rank-server": "", "host": ""}
_LEAST_BYTES = 9 * 2**27
"""Addresses with which torch can be loaded and a tiny model trained; with less, its libraries end
the process by a signal. Measured with torch 2.13 for CPUs on Linux."""

_REFUSED = (
    errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR,
    errno.EISDIR, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENODEV, errno.ENXIO,
)  # fmt: skip
"""Errors of a file that only its user can mend."""


def main(
    tokens: list[str] | None = None, *, on_loaded: Callable[[], object] = lambda: None
) -> None:
    """Runs one command line; exits with its code unless that is 0.

    Args:
        tokens: the words of the command line; None means those of this process.
        on_loaded: called when the command is imported, before it begins.
    """
    # OpenMP reads it once, when torch is first imported, which no module above does.
    if not any(name in os.environ for name in _WAIT_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = _ALLOCATOR
    # torch's own place is among temporary files, which a restart of the machine removes.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    words = sys.argv[1:] if tokens is None else tokens
    try:
        _require_usable(words)
        is_help = not words or words[0] in app.help_flags
        called = _new_app(is_listing=True) if is_help else app
        if words and words[0] in app:
            app[words[0]]  # imports it
        on_loaded()
        called(words, exit_on_error=False, print_error=False, result_action="return_value")
    except WindlassError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except CycloptsError as error:
        print_error(describe_usage_error(error))
        sys.exit(2)
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(RunInterrupted.exit_code)
    except BrokenPipeError:
        # The reader of the output is gone (`windlass runs | head`), so there is nobody to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:  # noqa: BLE001  any other error is a bug, shown with its trace
        if (refusal := _describe_refusal(error)) is not None:
            print_error(refusal)
            sys.exit(2)
        error_console.print_exception()
        print_error("this is a bug in Windlass; please report the trace above")
        sys.exit(3)


def _require_usable(words: list[str]) -> None:
    """Refuses words that no file could be named by, and limits that no command could report.

    Raises:
        RequestError: a word is not UTF-8, or contains a NUL character.
        MachineError: the command loads torch, and this process may have too little memory.
    """
    if words and words[0] in _COMMANDS["Train"] | _COMMANDS["Prove"] | _RANKS:
        require_addresses(_LEAST_BYTES)
    for word in words:
        if not is_text(word):
            raise RequestError(
                f"`{shorten(word)}` is not UTF-8 text, or has a NUL; rename what it names"
            )


def _describe_refusal(error: Exception) -> str | None:
    """One sentence on what only the user can mend; None for a bug of Windlass."""
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename is not None:
        reason = (error.strerror or "").lower()
        return f"`{shorten(str(error.filename))}` cannot be used: {reason}; name another place"
    return describe_limit(error)


_OTHER_WORDS = {
    "compare": ("diff", "machines compare"),
    "eval": ("evaluate",),
    "generate": ("sample",),
    "finetune": ("train",),
    "fine-tune": ("train",),
    "continue": ("resume",),
    "list": ("runs",),
    "ls": ("runs",),
    "info": ("show",),
    "verify": ("check",),
    "search": ("sweep",),
    "ui": ("serve",),
}
"""Words by which other tools call what a command does."""


def describe_usage_error(error: CycloptsError) -> str:
    """What is wrong with a command line, with the nearest word and the help that lists all."""
    if isinstance(error, UnknownOptionError):
        return _describe_option(error)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _describe_missing(error, error.argument)
    if not isinstance(error, UnknownCommandError | UnusedCliTokensError) or not error.unused_tokens:
        return str(error)
    word, *more = error.unused_tokens
    chain = " ".join(("windlass", *(error.command_chain or ())))
    known = [name for name in (error.app or ()) if not name.startswith("-")]
    hint = did_you_mean_any(_OTHER_WORDS.get(word, ())) if chain == "windlass" else ""
    hint = hint or did_you_mean(word, known)
    if isinstance(error, UnknownCommandError):
        return f"unknown command `{shorten(word)}`{hint}; `{chain} --help` lists all"
    words = f"`{shorten(word)}` and {len(more)} more are" if more else f"`{shorten(word)}` is"
    return f"{words} too much for `{chain}`{hint}; `{chain} --help` says what it takes"


def _describe_option(error: UnknownOptionError) -> str:
    """What may be meant by an option that no command takes: another one, or a key of a request."""
    option = (error.token.keyword or error.token.value).partition("=")[0]
    unknown = f"unknown option `{shorten(option)}`"
    command = " ".join(("windlass", *(error.command_chain or ())))
    known = {} if error.target is None else inspect.signature(error.target).parameters
    word = option.removeprefix("--")
    if word in known and known[word].kind is inspect.Parameter.POSITIONAL_ONLY:
        return f"{unknown}; write its value alone: `{command} {word.upper()}`"
    if "overrides" in known:
        from windlass.schema import Request

        if keys := Request.meant_keys(option):
            return f"{unknown}; write it as a key: `{'=...`, `'.join(keys)}=...`"
    options = [name for each in error.argument_collection if each.parse for name in each.names]
    return f"{unknown}{did_you_mean(option, options)}; `{command} --help` lists all"


def _describe_missing(error: MissingArgumentError, argument: Argument) -> str:
    """Which word a command lacks, or that an option stands there without its value."""
    command = " ".join(("windlass", *(error.command_chain or ())))
    name = argument.name
    if error.keyword is not None:
        what = f"a value behind `{error.keyword}`"
    elif argument.field_info.is_positional:
        what = f"`{name.lstrip('-').upper()}`"
    else:
        what = f"`{name}`"
    return f"`{command}` needs {what}; `{command} --help` says what it takes"
