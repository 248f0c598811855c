"""Renders a chat template in a process of its own, which has little time and memory.

A template comes with a model from anywhere. Jinja's sandbox keeps it from Python's internals and
from changing what it is given, but lets it loop for ever and double a text until memory ends; here
the kernel ends it. This file is run by its path, so that it imports neither torch nor Windlass.
"""

import contextlib
import json
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_START, _END = "\ufdd0", "\ufdd1"
"""Around what a `generation` block renders: two of the code points that Unicode keeps free for use
within a program, and that no text may hold."""
_MARK = re.compile(f"[{_START}{_END}]")
_MOST_FILES = 16
_FAULT_CHARACTERS = 1000


def serve(channel: Connection, *, cpu_seconds: float, idle_seconds: float) -> None:
    """Answers messages, which are JSON, until there is none for some time.

    The first holds the arguments of `_Renderer.compile`, each later one those of
    `_Renderer.render`; the answer is what these return, or null if there is too little memory.

    Args:
        channel: leads to the process that asks.
        cpu_seconds: processor time for one rendering; the kernel then ends this process.
        idle_seconds: time to wait for a message.
    """
    renderer = _Renderer(cpu_seconds)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while channel.poll(idle_seconds):
            arguments = json.loads(channel.recv_bytes())
            call = renderer.compile if renderer.template is None else renderer.render
            try:
                answer = json.dumps(_attempt(call, arguments))
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


class _Renderer:
    """Compiles and renders one template.

    White space, `break` and `continue`, `tojson` and `raise_exception` are as in transformers.
    `strftime_now` is missing: the same data would be another text on another day.
    """

    def __init__(self, cpu_seconds: float) -> None:
        self.template: Template | None = None
        self._marks = False
        self._cpu_seconds = cpu_seconds
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception

    def compile(self, source: str) -> bool:
        """Whether a template marks what is generated."""
        self._begin()
        self.template = self._environment.from_string(source)
        self._marks = any(
            getattr(each, "found", False) for each in self._environment.extensions.values()
        )
        return self._marks

    def render(self, conversations: Sequence[Mapping[str, Any]]) -> list[object]:
        """What `_conversation` returns of each, given its arguments, or `{"fault": ...}`."""
        return [_attempt(self._conversation, each) for each in conversations]

    def _conversation(
        self, messages: list[object], turns: Sequence[int], **more: object
    ) -> dict[str, object]:
        """The text of a conversation, and start and end of each answer in it.

        Args:
            messages: the turns.
            turns: those that are answers. Without marks they are told from what is rendered before
                and after each; a turn that changes once others follow is returned as `changed`.
            more: other variables of the template.
        """
        text, answers = _without_marks(self._text(messages, **more))
        if self._marks:
            return {"text": text, "answers": answers}
        for turn in turns:
            with_answer, _ = _without_marks(self._text(messages[: turn + 1], **more))
            asked = more | {"add_generation_prompt": True}
            question, _ = _without_marks(self._text(messages[:turn], **asked))
            if not with_answer.startswith(question):
                question, _ = _without_marks(self._text(messages[:turn], **more))
            if not (text.startswith(with_answer.rstrip()) and with_answer.startswith(question)):
                return {"changed": turn}
            # White space behind the mark of an answer's end belongs to the next turn.
            answers.append((len(question), max(len(question), len(with_answer.rstrip()))))
        return {"text": text, "answers": answers}

    def _text(self, messages: list[object], **more: object) -> str:
        self._begin()
        return "" if self.template is None else self.template.render(messages=messages, **more)

    def _begin(self) -> None:
        """Starts the clock, and lets `random` and `shuffle` draw the same for the same data."""
        random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Takes the marks out of a text and returns where they were."""
    found = list(_MARK.finditer(text))
    # Each mark before it has taken one character out.
    starts = [match.start() - index for index, match in enumerate(found)]
    answers = [
        (start, end)
        for (first, start), (_, end) in pairwise(zip(found, starts, strict=True))
        if first.group() == _START and start < end
    ]
    return _MARK.sub("", text), answers


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, which Jinja's own filter puts in."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`, which transformers has around answers."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form
    found = False

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that puts marks around it."""
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:  # noqa: ANN401  a macro of Jinja's
        return f"{_START}{caller()}{_END}"


def _limit_this_process(memory_bytes: int) -> None:
    """Leaves this process little memory, no files to write, and no dump of its memory."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
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
    _limit_this_process(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as _channel:
        serve(_channel, cpu_seconds=float(sys.argv[3]), idle_seconds=float(sys.argv[4]))
