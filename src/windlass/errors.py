"""All exceptions that a user can act on: what went wrong, with its numbers, and what to do.

An error carries plain values only, and the exit code of the command line: 1 the run failed, 2 the
input (or the machine) is at fault, 3 a bug, 130 stopped by the user.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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


class PlanError(WindlassError):
    """A plan that does not fit, is not valid, or whose program does not verify."""


class DataError(WindlassError):
    """A corpus that is missing, empty, too short or not text."""


class CheckpointError(WindlassError):
    """A checkpoint that is missing, damaged or from another model."""


class RecordError(WindlassError):
    """A run folder that is missing, locked by another process, or not readable."""


class StorageError(WindlassError):
    """The disk is full or not writable."""


class RunBroken(WindlassError):  # noqa: N818  a state of the run, not of the code
    """The run itself failed: a loss that is NaN, or weights that diverged."""

    exit_code = 1


class RankLost(RunBroken):
    """A rank of a run has died or hangs; the other ranks could continue.

    Args:
        message: which rank, at which instruction, and how.
        rank: global rank that is lost.
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


class InputErrors(WindlassError):  # noqa: N818  several at once
    """All errors of one input at once, one per line."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known name, or an empty string if none is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""
