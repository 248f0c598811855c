"""The command lines that README and docs print, in their order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")))

_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SHELL = ("", "text", "console")
"""Languages of blocks that hold command lines; those of other blocks are files and Python."""
_PROGRAMS = re.compile(r"(windlass|python|make) ")
"""What begins a command line in a block without prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """One command line of a page."""

    page: str
    text: str
    """As printed, on one line, without its prompt and its comment."""
    refusal: str
    """The sentence of a refusal that is printed below it; empty if there is none."""


def command_lines(page: str) -> tuple[CommandLine, ...]:
    """The command lines of a page, in their order."""
    return tuple(
        command
        for indent, language, block in _FENCE.findall((ROOT / page).read_text())
        if language in _SHELL
        for command in _of_block(page, [line.removeprefix(indent) for line in block.splitlines()])
    )


def printed_file(page: str, name: str) -> str:
    """A file that a page prints, in a block that begins with its name."""
    blocks = (block for _, _, block in _FENCE.findall((ROOT / page).read_text()))
    return next(block for block in blocks if block.startswith(f"# {name}"))


def _of_block(page: str, lines: list[str]) -> Iterator[CommandLine]:
    has_prompts = any(line.startswith("$ ") for line in lines)
    starts = [
        index
        for index, line in enumerate(lines)
        if (line.startswith("$ ") if has_prompts else _PROGRAMS.match(line))
    ]
    for start, end in zip(starts, [*starts[1:], len(lines)][: len(starts)], strict=True):
        last = start
        while lines[last].endswith("\\"):
            last += 1
        text = " ".join(
            line.removeprefix("$ ").rstrip("\\").strip() for line in lines[start : last + 1]
        )
        below = " ".join(lines[last + 1 : end])
        refusal = below.removeprefix("windlass: ") if below.startswith("windlass: ") else ""
        yield CommandLine(page=page, text=re.sub(r"\s+# .*$", "", text), refusal=refusal)
