"""The one tree of exceptions: what went wrong, with its numbers, and the way out.

An error carries plain values, never objects of the house, and knows the exit code that the command
line ends with: 1 the run is broken, 2 your input (or the machine under it), 130 stopped by hand.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class WindlassError(Exception):
    """Something a user can mend; the message is one sentence with its numbers and the way out."""

    exit_code = 2


class RequestError(WindlassError, ValueError):
    """A request, file or override that cannot be read as what it should be.

    It is a `ValueError` too, so that pydantic reports it as a fault of the field being read.
    """


class ModelError(WindlassError):
    """A model that is unknown, is no chain of layers, or cannot be captured."""


class MachineError(WindlassError):
    """A machine that is unknown or cannot be measured."""


class PlanError(WindlassError):
    """A plan that does not fit, is not legal, or whose program does not verify."""


class DataError(WindlassError):
    """A corpus that is missing, empty, too short or not readable as text."""


class CheckpointError(WindlassError):
    """A checkpoint that is missing, damaged or of another model."""


class RecordError(WindlassError):
    """A run folder that is missing, taken by another process, or not readable."""


class StorageError(WindlassError):
    """The disk is full or does not take what must be written."""


class RunBroken(WindlassError):  # noqa: N818  a state of the run, not of the code
    """The run itself went wrong: a loss that is no number, weights that blew up."""

    exit_code = 1


class RankLost(RunBroken):
    """A device of a run is gone, or does not go on; the others could.

    Args:
        message: which one, at what, and how.
        device: its number.
        for_good: whether it was killed, and not only silent.
    """

    def __init__(self, message: str, *, rank: int, permanent: bool) -> None:
        self.device, self.for_good = rank, permanent
        super().__init__(message)


class RankError(WindlassError):
    """A device of a run met an error that is none of ours: a slip in its code or in the model's."""

    exit_code = 3


class RunInterrupted(WindlassError):  # noqa: N818  a wish, not a fault
    """The run was stopped by hand; its state is saved."""

    exit_code = 130


class OutOfMemory(WindlassError):  # noqa: N818  a state of the machine, not of the code
    """Memory ran out while a run was under way; it can go on where there is more.

    Args:
        message: what ran out, when, and where to go on from.
        room_bytes: that this process could have held by then, all in all.
    """

    def __init__(self, message: str, *, available_bytes: int) -> None:
        self.room_bytes = available_bytes
        super().__init__(message)


class InputErrors(WindlassError):  # noqa: N818  several at once
    """All faults of one input at once, one a line."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.faults = tuple(messages)
        super().__init__("\n".join(self.faults))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?` for the nearest known name, or nothing if none is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""
