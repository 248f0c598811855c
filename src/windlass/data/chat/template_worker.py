"""Renders chat templates by transformers, in a process that has little time and memory.

A template comes with a model from anywhere. Jinja's sandbox keeps it from Python's internals and
from changing what it is given, but lets it loop for ever and double a text until memory ends; here
the kernel ends it. This file is run by its path, so that it imports neither torch nor Windlass.
"""

import contextlib
import datetime as dt
import json
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, pass_eval_context

_START, _END, _INSTEAD = "\ufdd0", "\ufdd1", "\ufdd2\ufdd3"
"""Around what a `generation` block renders, and in place of an answer: code points that Unicode
keeps free for use within a program, and that no text may hold."""
_MARK = re.compile(f"[{_START}{_END}]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message, beside its content, whose text a template may render."""
_MOST_FILES = 16
_FAULT_CHARACTERS = 1000


def serve(channel: Connection, *, cpu_seconds: float, idle_seconds: float) -> None:
    """Answers messages, which are JSON, until there is none for some time.

    A message holds the arguments of `_Renderer.render`; the answer is what it returns, or null if
    there is too little memory.

    Args:
        channel: leads to the process that asks.
        cpu_seconds: processor time for one rendering; the kernel then ends this process.
        idle_seconds: time to wait for a message.
    """
    renderer = _Renderer(cpu_seconds)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while channel.poll(idle_seconds):
            arguments = json.loads(channel.recv_bytes())
            try:
                answer = json.dumps(_attempt(renderer.render, arguments))
            except MemoryError:
                answer = "null"
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.send_bytes(answer.encode())


def _attempt(call: Callable[..., object], arguments: Mapping[str, Any]) -> object:
    """The result of a call, or `{"fault": ...}`."""
    try:
        return call(**arguments)
    except MemoryError:
        raise
    except RecursionError:
        fault = "it nests too deeply"
    except TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {error.message}"
    except TemplateError as error:
        fault = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001  a template may fail in any way
        fault = f"{type(error).__name__}: {error}"
    return {"fault": fault[:_FAULT_CHARACTERS]}


class _AmbiguousAnswerError(Exception):
    """Nothing proves which characters are an answer."""


class _Renderer:
    """Renders templates as `apply_chat_template` of transformers does."""

    def __init__(self, cpu_seconds: float) -> None:
        self._cpu_seconds = cpu_seconds

    def render(
        self, source: str, conversations: Sequence[Mapping[str, Any]], date: str | None
    ) -> list[object]:
        """What `_conversation` returns of each, given its arguments, or `{"fault": ...}`.

        Args:
            date: the day that `strftime_now` tells, in the form of ISO 8601; None is today.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._begin()
        self._source = source
        self._environment = _compile_jinja_template(source).environment
        day = dt.datetime.now() if date is None else dt.datetime.fromisoformat(date)  # noqa: DTZ005  as transformers
        self._environment.globals["strftime_now"] = day.strftime
        return [_attempt(self._conversation, each) for each in conversations]

    def _conversation(
        self,
        messages: list[dict[str, Any]],
        turns: Sequence[int],
        added_tokens: Sequence[str] = (),
        **more: object,
    ) -> dict[str, object]:
        """The text of a conversation, and start and end of each answer in it.

        Args:
            turns: those that are answers. Without `generation` blocks they are told by a difference
                of renderings; an answer that these do not prove is returned as `ambiguous`.
            added_tokens: texts of the tokens that no answer ends within.
            more: other variables of the template.
        """
        self._more = more
        messages, text = self._readable(messages)
        if _GENERATION.search(self._source):
            return {"text": text, "answers": self._marked(messages, text), "dropped": []}
        answers, dropped = [], []
        for turn in turns:
            try:
                start, end, is_whole = _Answer(
                    self._text, messages, turn, text, added_tokens
                ).find()
            except _AmbiguousAnswerError:
                return {"ambiguous": turn}
            answers.append((start, end))
            if not is_whole:
                dropped.append(turn)
        return {"text": text, "answers": answers, "dropped": dropped}

    def _readable(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Messages that a template can read, and their text.

        Content may be a list of parts of text, which a template for texts alone gets joined.
        """
        parts = [each["content"] for each in messages if isinstance(each.get("content"), list)]
        if not parts:
            return messages, self._text(messages)
        with contextlib.suppress(TemplateError, TypeError, AttributeError, ValueError):
            text = self._text(messages)
            if not any(str(each) in text for each in parts):
                return messages, text
        joined = [
            {**each, "content": "".join(part["text"] for part in each["content"])}
            if isinstance(each.get("content"), list)
            else each
            for each in messages
        ]
        return joined, self._text(joined)

    def _marked(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """Start and end of what each `generation` block renders.

        Marks tell them, which `transformers` does not need: it counts what is rendered before, and
        is wrong for a block in a macro.
        """
        (tracker,) = (
            each for each in self._environment.extensions.values() if "generation" in each.tags
        )
        tracker._generation_support = pass_eval_context(  # noqa: SLF001
            lambda _context, caller: f"{_START}{caller()}{_END}"
        )
        try:
            marked = self._text(messages)
        finally:
            del tracker._generation_support  # noqa: SLF001
        bare, answers = _without_marks(marked)
        if bare != text:
            raise TemplateError("it changes what its `generation` blocks have rendered")
        return answers

    def _text(self, messages: list[dict[str, Any]], **more: object) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._begin()
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=self._source, **self._more | more
        )
        return str(rendered[0])

    def _begin(self) -> None:
        """Starts the clock, and lets `random` and `shuffle` draw the same for the same data."""
        random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds)


class _Answer:
    """One answer in a conversation whose template marks none.

    It begins where the generation prompt of the turns before it ends, and ends with the mark that
    the conversation up to it ends with. A template may render a turn in another way once others
    follow; then the answer is found by what stands around another content in its place.

    Args:
        turn: the answer's place in them.
        special: texts of the tokens that no answer ends within.
    """

    def __init__(
        self,
        render: Callable[..., str],
        messages: list[dict[str, Any]],
        turn: int,
        text: str,
        special: Sequence[str],
    ) -> None:
        self._render, self._messages, self._turn = render, messages, turn
        self._text, self._special = text, special

    def find(self) -> tuple[int, int, bool]:
        """Start and end, and whether all of it is rendered though other turns follow.

        Raises:
            _AmbiguousAnswerError: nothing proves them.
        """
        before, upto = self._messages[: self._turn], self._messages[: self._turn + 1]
        question = self._optional(before, add_generation_prompt=True)
        alone = self._optional(upto)
        whole = alone is not None and self._text.startswith(alone.rstrip())
        if whole and alone is not None and question is not None and alone.startswith(question):
            # White space behind the mark of an answer's end belongs to the next turn.
            return len(question), max(len(question), len(alone.rstrip())), True
        around = self._around(self._messages, self._text)
        start = self._start(before, question, around)
        if whole and alone is not None:
            return start, max(start, len(alone.rstrip())), True
        if around is None or alone is None:
            raise _AmbiguousAnswerError
        end = len(self._text) - len(around[1])
        around_alone = self._around(upto, alone)
        if around_alone is None or end < start:
            raise _AmbiguousAnswerError
        behind = self._common_end(around_alone[1], around[1])
        end = len(self._text[: end + behind].rstrip()) if behind == 0 else end + behind
        return start, max(start, end), self._is_whole(alone, start, end)

    def _start(
        self,
        before: list[dict[str, Any]],
        question: str | None,
        around: tuple[str, str] | None,
    ) -> int:
        """Where the answer begins: behind all of the generation prompt that stands in the text."""
        opening = around[0] if around and self._text.startswith(around[0]) else None
        if question is None:
            if before or opening is None:
                raise _AmbiguousAnswerError
            return len(opening)
        if self._text.startswith(question):
            return len(question)
        plain = self._optional(before)
        shared = _shared_length(question, self._text)
        if (
            plain is not None
            and self._text.startswith(plain.rstrip())
            and shared >= len(plain.rstrip())
        ):
            return shared if opening is None else min(shared, len(opening))
        # What stands before the content is the template's own, if the message has no more text.
        if opening is None or any(self._messages[self._turn].get(field) for field in _THOUGHTS):
            raise _AmbiguousAnswerError
        return len(opening)

    def _around(self, messages: list[dict[str, Any]], text: str) -> tuple[str, str] | None:
        """What stands before and behind the answer's content; None if that is not certain."""
        content = messages[self._turn].get("content")
        if not content:
            return None
        instead: object = _INSTEAD
        if isinstance(content, list):
            instead = [{"type": "text", "text": _INSTEAD}]
        other = list(messages)
        other[self._turn] = {**messages[self._turn], "content": instead}
        rendered = self._optional(other)
        if rendered is None or rendered.count(_INSTEAD) != 1:
            return None
        opening, behind = rendered.split(_INSTEAD)
        return (opening, behind) if text.endswith(behind) else None

    def _common_end(self, alone: str, among: str) -> int:
        """Characters behind the content that end the answer, alone and among other turns."""
        mark = alone.rstrip()
        if among.startswith(mark):
            return len(mark)
        length = _shared_length(mark, among)
        for text in (mark, among):
            for token in self._special:
                for found in re.finditer(re.escape(token), text):
                    if found.start() < length < found.end():
                        length = found.start()
        end = among[:length]
        if end and end == end.rstrip() and not end.endswith(tuple(self._special)):
            raise _AmbiguousAnswerError
        return len(end.rstrip())

    def _is_whole(self, alone: str, start: int, end: int) -> bool:
        """Whether the text has each line of the answer that the conversation up to it has."""
        message = self._messages[self._turn]
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        texts = [content, *(message.get(field) for field in _THOUGHTS)]
        lines = {
            line.strip() for text in texts if isinstance(text, str) for line in text.splitlines()
        }
        answer = self._text[start:end]
        return all(line in answer for line in lines if line in alone[start:])

    def _optional(self, messages: list[dict[str, Any]], **more: object) -> str | None:
        """The text of messages; None if the template refuses them."""
        try:
            return self._render(messages, **more)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  a template may refuse in any way
            return None


def _shared_length(first: str, second: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other),
        min(len(first), len(second)),
    )


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Takes the marks out of a text and returns where they were."""
    found = list(_MARK.finditer(text))
    # Each mark before it has taken one character out.
    starts = [match.start() - index for index, match in enumerate(found)]
    answers = [
        (start, end)
        for (first, start), (second, end) in pairwise(zip(found, starts, strict=True))
        if first.group() == _START and second.group() == _END
    ]
    return _MARK.sub("", text), answers


def _limit_this_process(memory_bytes: int) -> None:
    """Leaves this process little more memory, no files to write, and no dump of its memory."""
    pages = 0
    with contextlib.suppress(OSError):  # Linux alone has the file
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limits = {
        resource.RLIMIT_AS: memory_bytes + pages * resource.getpagesize(),
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MOST_FILES,
    }
    for kind, wanted in limits.items():
        _, most = resource.getrlimit(kind)
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        # macOS bounds no address space.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # what transformers would import
    with Connection(int(sys.argv[1])) as _channel:
        try:
            import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited
        except ImportError as _error:
            _channel.recv_bytes()
            _channel.send_bytes(json.dumps({"missing": str(_error)}).encode())
            sys.exit(0)
        _limit_this_process(int(sys.argv[2]))
        serve(_channel, cpu_seconds=float(sys.argv[3]), idle_seconds=float(sys.argv[4]))
