"""Generated templates and rows: texts are those of transformers, answers those of an oracle.

A style is written twice: as a Jinja template of the constructs that well-known ones have, and as
the pieces of text that it renders, each learned or not.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from windlass.data.chat import ChatRows, ChatTemplate
from windlass.data.readers import TextDocument

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = ("<s>", "</s>", "<|b|>", "<|e|>")
DATE = "2025-03-04"


@dataclass(frozen=True)
class Style:
    header: str = "<|b|>{}\n"
    end: str = "<|e|>\n"
    last: str = ""
    """Stands behind the end of the last turn alone."""
    marks: str = ""
    """`plain` or `macro`: how answers are marked; empty marks none."""
    trims: bool = False
    thoughts: str = ""
    """`drops` those of earlier turns, or writes `empty` ones into the last; else leaves all."""
    prompts_thought: bool = False
    begins: bool = False
    system: str = "turn"
    """Whether a system prompt is a `turn`, stands `before` the first user's, or is left `out`."""
    dates: bool = False
    tools: bool = False
    kwargs: bool = False
    parts: bool = False
    """Whether content may be a list of parts."""

    @property
    def source(self) -> str:
        """The Jinja template."""
        return "".join((*self._opening(), *self._turn(), "{%- endfor -%}", self._prompt()))

    def _closed(self) -> str:
        """A turn's text and its end."""
        text = "text | trim" if self.trims else "text"
        return f"{{{{- {text} + {quoted(self.end)} -}}}}"

    def _opening(self) -> Iterator[str]:
        yield "{%- set ns = namespace(last=-1, system='') -%}"
        if self.marks == "macro":
            block = f"{{%- generation -%}}{self._closed()}{{%- endgeneration -%}}"
            yield f"{{%- macro answer(text) -%}}{block}{{%- endmacro -%}}"
        if self.begins:
            yield "{{- bos_token -}}"
        if self.dates:
            yield "{{- 'Day ' + strftime_now('%d %b %Y') + '\\n' -}}"
        if self.tools:
            yield "{%- if tools -%}{%- for tool in tools -%}{{- tool | tojson(indent=2) + '\\n' -}}"
            yield "{%- endfor -%}{%- endif -%}"
        if self.kwargs:
            yield "{%- if deep is defined and deep -%}{{- 'Deep.\\n' -}}{%- endif -%}"
        yield "{%- for message in messages[::-1] -%}"
        yield "{%- if ns.last < 0 and message.role == 'user' -%}"
        yield "{%- set ns.last = (messages | length) - 1 - loop.index0 -%}"
        yield "{%- endif -%}{%- endfor -%}"
        yield "{%- for message in messages -%}"

    def _turn(self) -> Iterator[str]:
        yield "{%- set text = message.content -%}"
        if self.parts:
            yield "{%- if text is not string -%}"
            yield "{%- set text = text | map(attribute='text') | join('') -%}{%- endif -%}"
        if self.system != "turn":
            kept = "text + '\\n'" if self.system == "before" else "''"
            yield "{%- if message.role == 'system' -%}"
            yield f"{{%- set ns.system = {kept} -%}}{{%- continue -%}}{{%- endif -%}}"
        if self.system == "before":
            yield "{%- if message.role == 'user' -%}{%- set text = ns.system + text -%}"
            yield "{%- set ns.system = '' -%}{%- endif -%}"
        if self.thoughts == "drops":
            yield "{%- if message.role == 'assistant' and '</think>' in text "
            yield "and loop.index0 < ns.last -%}"
            yield "{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
        if self.thoughts == "empty":
            yield "{%- if message.role == 'assistant' and loop.last and '</think>' not in text -%}"
            yield "{%- set text = '<think>\\n\\n</think>\\n\\n' + text -%}{%- endif -%}"
        before, behind = map(quoted, self.header.split("{}"))
        yield f"{{{{- {before} + message['role'] + {behind} -}}}}"
        yield f"{{%- if message.role == 'assistant' -%}}{self._answer()}"
        yield f"{{%- else -%}}{self._closed()}{{%- endif -%}}"

    def _answer(self) -> str:
        if self.marks == "macro":
            return "{{- answer(text) -}}"
        last = f"{{%- if loop.last -%}}{{{{- '{self.last}' -}}}}{{%- endif -%}}"
        body = self._closed() + (last if self.last else "")
        return f"{{%- generation -%}}{body}{{%- endgeneration -%}}" if self.marks else body

    def _prompt(self) -> str:
        asked = self.header.format("assistant") + ("<think>\n" if self.prompts_thought else "")
        return f"{{%- if add_generation_prompt -%}}{{{{- {quoted(asked)} -}}}}{{%- endif -%}}"

    def pieces(self, messages: list[dict[str, Any]], **more: Any) -> list[tuple[str, bool]]:  # noqa: ANN401
        """What is rendered, piece by piece, and whether it is learned."""
        pieces = [("<s>" if self.begins else "", False)]
        pieces += [("Day 04 Mar 2025\n", False)] if self.dates else []
        for tool in (more.get("tools") or []) if self.tools else []:
            pieces.append((json.dumps(tool, indent=2, ensure_ascii=False) + "\n", False))
        pieces += [("Deep.\n", False)] if self.kwargs and more.get("deep") else []
        last_user = max(i for i, each in enumerate(messages) if each["role"] == "user")
        system = ""
        for index, message in enumerate(messages):
            role, text = message["role"], text_of(message)
            if self.system != "turn" and role == "system":
                system = text + "\n" if self.system == "before" else ""
                continue
            if role == "user":
                text, system = system + text, ""
            pieces.append((self.header.format(role), False))
            if role == "assistant":
                pieces += self._answer_pieces(text, index < last_user, index == len(messages) - 1)
            else:
                pieces.append(((text.strip() if self.trims else text) + self.end, False))
        return pieces

    def _answer_pieces(self, text: str, is_early: bool, is_last: bool) -> list[tuple[str, bool]]:
        whole, thinks = True, "</think>" in text
        if thinks and self.thoughts == "drops" and is_early:
            shorter = text.split("</think>")[-1].lstrip("\n")
            whole = all(line.strip() in shorter for line in text.splitlines())
            text = shorter
        if self.thoughts == "empty" and is_last and not thinks:
            text = "<think>\n\n</think>\n\n" + text
        closed = (text.strip() if self.trims else text) + self.end + (self.last if is_last else "")
        if self.marks:
            return [(closed, True)]
        prompted = self.prompts_thought and closed.startswith("<think>\n")
        shared = len("<think>\n") if prompted else 0
        answer = closed[shared:].rstrip()
        return [(closed[:shared], False), (answer, whole), (closed[shared + len(answer) :], False)]


def quoted(text: str) -> str:
    """A text as Jinja writes it."""
    return "'" + text.replace("\n", "\\n") + "'"


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


words = st.text(st.sampled_from("abXY é日🙂.,<|>/[]{}'\"\\\n "), min_size=1, max_size=12).filter(
    lambda text: text.strip() != ""
)
contents = words | st.sampled_from(
    ["It is 4.", " spaced \n", "<|e|>", "</s>", "user", "<think>", "assistant\n", "[/INST]"]
)
thoughts = st.tuples(words, words).map(lambda both: f"<think>\n{both[0]}\n</think>\n\n{both[1]}")
headers = st.sampled_from(["<|b|>{}\n", "### {}:\n", "{}: ", "<|b|>{}<|e|>\n\n"])
styles = st.builds(
    Style,
    header=headers,
    end=st.sampled_from(["<|e|>\n", "</s>", "\n", "\n\n", "<|e|>"]),
    last=st.sampled_from(["", "", "</s>"]),
    marks=st.sampled_from(["", "", "plain", "macro"]),
    trims=st.booleans(),
    thoughts=st.sampled_from(["", "drops", "empty"]),
    prompts_thought=st.booleans(),
    begins=st.booleans(),
    system=st.sampled_from(["turn", "before", "out"]),
    dates=st.booleans(),
    tools=st.booleans(),
    kwargs=st.booleans(),
    parts=st.booleans(),
).map(lambda style: replace(style, last="") if style.marks == "macro" else style)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row of messages, perhaps with tools and variables of its template."""
    turns = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(contents)})
        turns.append({"role": "assistant", "content": draw(contents | thoughts)})
    row: dict[str, Any] = {"messages": turns}
    if draw(st.booleans()):
        row["tools"] = [{"type": "function", "function": {"name": draw(words)}}]
    if draw(st.booleans()):
        row["chat_template_kwargs"] = {"deep": draw(st.booleans())}
    return row


@cache
def library() -> Any:  # noqa: ANN401  transformers has no types
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def check(style: Style, row: dict[str, Any]) -> bool:
    """Compares a row with transformers and the oracle; whether its answers were told."""
    more = row.get("chat_template_kwargs", {})
    if style.parts:
        row = row | {
            "messages": [
                each | {"content": [{"type": "text", "text": each["content"]}]}
                for each in row["messages"]
            ]
        }
    messages, tools = row["messages"], row.get("tools")
    template = ChatTemplate(
        name="`t`", source=style.source, special_tokens=SPECIAL, date=DATE, added_tokens=MARKS
    )
    document = ChatRows(template).document("row", "row 1", row)
    today = datetime.now(tz=UTC).astimezone().strftime("%d %b %Y")
    (theirs,), _ = library()(
        conversations=[messages], tools=tools, chat_template=style.source, **SPECIAL, **more
    )
    pieces = style.pieces(messages, tools=tools, **more)
    expected = "".join(text for text, _ in pieces)
    assert theirs.replace(today, "04 Mar 2025", 1) == expected
    if not isinstance(document, TextDocument):
        assert document.message.startswith("row 1: ")
        return False
    assert document.text == expected
    learned = [False] * len(expected)
    for span in document.targets or ():
        learned[span.start : span.end] = [True] * (span.end - span.start)
    assert learned == [is_learned for text, is_learned in pieces for _ in text]
    return True


@given(style=styles, row=rows())
def test_a_template_renders_as_in_transformers_and_answers_are_told_or_refused(
    style: Style, row: dict[str, Any]
):
    check(style, row)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(style=styles, row=rows())
def test_two_thousand_templates_render_as_in_transformers(style: Style, row: dict[str, Any]):
    check(style, row)
