"""Messages for words that no command takes, where cyclopts's own say too little."""

import inspect

from cyclopts import (
    Argument,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from windlass.errors import did_you_mean, did_you_mean_any, shorten

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
