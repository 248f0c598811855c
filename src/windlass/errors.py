"""All exceptions that a user can act on: what went wrong, with its numbers, and what to do.

An error carries plain values only, and the exit code of the command line: 1 the run failed, 2 the
input (or the machine) is at fault, 3 a bug, 130 stopped by the user; 0 where all is done already.
"""

import errno
import re
import resource
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_MAX_ALIKE, _SHOWN_ALIKE = 4, 3
"""Messages that differ only in names and numbers are counted beyond the first of these many, of
which then as many as the second are shown."""
_MAX_SHOWN = 160
"""Characters of a name or value that a message shows in full."""


class WindlassError(Exception):
    """An error that a user can fix; the message is one sentence that says how."""

    exit_code = 2


class RequestError(WindlassError, ValueError):
    """A request, file or override that cannot be parsed.

    It is also a `ValueError`, so that pydantic reports it as an error of the field being parsed.
    """


class ModelError(WindlassError):
    """A model that is unknown, is not a sequence of layers, or cannot be captured."""


class MachineError(WindlassError):
    """A machine that is unknown or cannot be measured."""


class StackError(WindlassError):
    """A software stack that is unknown, or that cannot do what is asked of it."""


class PlanError(WindlassError):
    """A plan that does not fit, is not valid, or whose program does not verify."""


class DataError(WindlassError):
    """A corpus that is missing, empty, too short or not text."""


class CheckpointError(WindlassError):
    """A checkpoint that is missing, damaged or from another model."""


class RecordError(WindlassError):
    """A run folder that is missing, locked by another process, or not readable."""


class RunFinished(RecordError):  # noqa: N818  a state of the run, not a fault
    """A run has nothing left to do: whoever starts it again, as a scheduler does, is done."""

    exit_code = 0


class StorageError(WindlassError):
    """The disk is full or not writable."""


class RunBroken(WindlassError):  # noqa: N818  a state of the run, not of the code
    """The run itself failed: a loss that is NaN, or weights that diverged."""

    exit_code = 1


class RankLost(RunBroken):
    """A rank of a run has died or hangs; the other ranks could continue.

    Args:
        message: which rank, at which instruction, and how.
        permanent: whether it was killed, and does not only hang.
    """

    def __init__(self, message: str, *, rank: int, permanent: bool) -> None:
        self.rank, self.permanent = rank, permanent
        super().__init__(message)


class RankError(WindlassError):
    """A rank failed with an unexpected exception: a bug in Windlass or in the model."""

    exit_code = 3


class RunInterrupted(WindlassError):  # noqa: N818  a wish, not a fault
    """The user stopped the run; its state is saved."""

    exit_code = 130


class OutOfMemory(WindlassError):  # noqa: N818  a state of the machine, not of the code
    """Memory ran out during a run, which can resume where there is more.

    Args:
        message: what ran out, when, and where to resume from.
        available_bytes: the most that this process could have held at that time.
    """

    def __init__(self, message: str, *, available_bytes: int) -> None:
        self.available_bytes = available_bytes
        super().__init__(message)


_REFUSED_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory")
_REFUSED_THREADS = ("can't start new thread", "resource temporarily unavailable")


def describe_limit(error: BaseException) -> str | None:
    """One sentence on a limit of the machine, or of its user, that an error has run into.

    Returns:
        What ran out, and how much of it a process may have; None for any other error.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        number, text = getattr(cause, "errno", None), str(cause).lower()
        if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
            most = _limit(resource.RLIMIT_NOFILE)
            return f"a process may have {most} open files here; raise that by `ulimit -n 4096`"
        if (
            isinstance(cause, MemoryError)
            or number == errno.ENOMEM
            or any(each in text for each in _REFUSED_MEMORY)
        ):
            most = _limit(resource.RLIMIT_AS, 2**20)
            own = "" if most == "any number of" else f", where a process may have {most} MiB"
            return f"memory ran out{own}; raise `ulimit -v`, or take a machine with more"
        if any(each in text for each in _REFUSED_THREADS):
            most = _limit(resource.RLIMIT_NPROC)
            return f"a user may have {most} processes and threads here; raise that by `ulimit -u`"
        cause = cause.__cause__ or cause.__context__
    return None


def require_addresses(least_bytes: int) -> None:
    """Refuses a limit on memory under which native libraries end the process without a word.

    Raises:
        MachineError: this process may have less.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < least_bytes:
        raise MachineError(
            f"a process may have {most // 2**20} MiB of memory here, and loading torch alone takes "
            f"about {least_bytes // 2**20} MiB; raise that by `ulimit -v`"
        )


def _limit(kind: int, unit: int = 1) -> str:
    most = resource.getrlimit(kind)[0]
    return "any number of" if most == resource.RLIM_INFINITY else str(most // unit)


class InputErrors(WindlassError):  # noqa: N818  several at once
    """All errors of one input at once, one per line; of many that are alike, how many there are."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(_counted(self.messages)))


def _counted(messages: Sequence[str]) -> Iterable[str]:
    alike: dict[str, list[str]] = {}
    for message in messages:
        # Faults are alike if only names, values, numbers and hints differ.
        kind = re.sub(r"`[^`]*`|'[^']*'|[0-9]+", "", message.partition("; ")[0])
        alike.setdefault(kind, []).append(message)
    for group in alike.values():
        shown = len(group) if len(group) <= _MAX_ALIKE else _SHOWN_ALIKE
        yield from group[:shown]
        if shown < len(group):
            yield f"... and {len(group) - shown} more like it"


def raise_data_errors(messages: Sequence[str]) -> None:
    """Raises what is wrong with data, if anything is.

    Raises:
        DataError: one thing is wrong.
    """
    if len(messages) == 1:
        raise DataError(messages[0])
    if messages:
        raise InputErrors(messages)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known name, or an empty string if none is near."""
    return did_you_mean_any(get_close_matches(shorten(name), list(known), n=1, cutoff=0.6))


def did_you_mean_any(names: Sequence[str]) -> str:
    """`; did you mean ... or ...?` with all the names, or an empty string without any."""
    quoted = [f"`{name}`" for name in names]
    words = " or ".join(filter(None, (", ".join(quoted[:-1]), *quoted[-1:])))
    return f"; did you mean {words}?" if words else ""


def is_text(name: str) -> bool:
    """Whether a text can be written to a file and named to the system: UTF-8 without NUL."""
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def shorten(text: str) -> str:
    """The text for a message: its two ends and its length if it is long, and escaped characters."""
    if len(text) > _MAX_SHOWN:
        end = _MAX_SHOWN // 4
        return f"{shorten(text[:end])}...{shorten(text[-end:])} ({len(text)} characters)"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
