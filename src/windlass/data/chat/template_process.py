"""The process that renders chat templates: how it starts, what it may take, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from windlass.errors import DataError
from windlass.units import format_bytes, format_seconds

_MOST_RENDERINGS = 6
"""Renderings that may prove where an answer without marks begins and ends."""
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFault(Exception):  # noqa: N818  a reason, which the caller places
    """Why a template does not compile, or does not render a conversation."""


class TemplateLimitFault(TemplateFault):
    """A template takes more time or memory than a conversation may need."""


class TemplateLimits(NamedTuple):
    """What a template may take."""

    cpu_seconds: float = 5.0
    """Processor time of one rendering, and of compiling it."""
    wall_seconds: float = 60.0
    """The same by the clock, for a machine that is busy."""
    memory_bytes: int = 2**30
    """Address space of its process."""
    answer_bytes: int = 2**26
    """Size of all that it renders of one conversation, as JSON."""
    idle_seconds: float = 10.0
    """Time without a conversation after which its process ends; the next one starts it again."""


class TemplateProcess:
    """Renders templates in a process of its own, which the kernel keeps within its limits.

    The process starts with the first template, since it takes a second.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._owner: int | None = None

    def render(
        self, source: str, conversations: Sequence[Mapping[str, object]], date: str | None = None
    ) -> list[Mapping[str, Any]]:
        """What the worker's `_conversation` returns of each, or its `fault` (`Any`: JSON).

        Args:
            source: the template, which is compiled even for no conversation.
            conversations: the arguments of `_conversation`.
            date: the day that `strftime_now` tells, in the form of ISO 8601; None is today.

        Raises:
            TemplateFault: the template does not compile.
            TemplateLimitFault: one of them takes too much time or memory.
            DataError: the package transformers is missing.
        """
        arguments = {"source": source, "conversations": conversations, "date": date}
        turns = (len(cast("list[int]", each["turns"])) for each in conversations)
        renderings = 1 + sum(2 + _MOST_RENDERINGS * count for count in turns)
        with self._lock:
            answer: Any = None
            # A process that was forked from the one that started the worker starts its own.
            if self._owner == os.getpid():
                with suppress(_EndedItself):
                    answer = self._ask(arguments, renderings)
            if answer is None:
                self._start()
                answer = self._ask(arguments, renderings)
        if isinstance(answer, list):
            return answer
        if "missing" in answer:
            raise DataError(
                "chat templates need the package `transformers`; install `windlass[hf]`"
            )
        raise TemplateFault(answer["fault"])

    def _start(self) -> None:
        """Starts the process."""
        limits = self._limits
        self._owner = os.getpid()
        self._channel, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own words, no shell
                (
                    sys.executable, "-P", str(_WORKER), str(theirs.fileno()),
                    str(limits.memory_bytes), str(limits.cpu_seconds), str(limits.idle_seconds),
                ),
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, process_group=0,  # Ctrl-C is for this process
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._channel)

    def _ask(self, arguments: Mapping[str, object], renderings: int) -> Any:  # noqa: ANN401  JSON
        """The answer to a message; without one, the process is ended."""
        limits, answer = self._limits, None
        try:
            # Tables hold values that JSON does not, such as dates: a template shows their text.
            self._channel.send_bytes(json.dumps(arguments, default=str).encode())
            if not self._channel.poll(limits.wall_seconds * renderings):
                seconds = format_seconds(limits.wall_seconds)
                raise TemplateLimitFault(f"it takes longer than {seconds}")
            answer = json.loads(self._channel.recv_bytes(limits.answer_bytes))
        except (EOFError, ConnectionError):
            raise self._fault_of_end() from None
        except OSError:  # how `recv_bytes` refuses a long message
            size = format_bytes(limits.answer_bytes)
            raise TemplateLimitFault(f"it makes more than {size} of text") from None
        except RecursionError:
            raise TemplateLimitFault("the conversation nests too deeply") from None
        finally:
            if answer is None:
                self._owner = None
                self._end()
        if answer is None:
            size = format_bytes(limits.memory_bytes)
            raise TemplateLimitFault(f"it needs more than {size} of memory")
        return answer

    def _fault_of_end(self) -> Exception:
        """Why the process has ended."""
        self._channel.close()
        code = self._process.wait()
        if code == 0:
            return _EndedItself()
        if code == -signal.SIGPROF:
            seconds = format_seconds(self._limits.cpu_seconds)
            return TemplateLimitFault(f"it takes more than {seconds} of processor time")
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return TemplateLimitFault(f"the process that renders it has ended {how}")


class _EndedItself(Exception):  # noqa: N818  no fault
    """The process had nothing to do for a while, and has ended."""


def _end(owner: int, process: subprocess.Popen[bytes], channel: Connection) -> None:
    channel.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
