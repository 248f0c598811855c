"""Measures the house: lines, modules and functions by room, and how far one axis reaches.

Run from the root of a checkout: `python scripts/house.py [--page]`. With `--page` the table is
written into `docs/design/house.md`, below its own sentences.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src/windlass")
PAGE = Path("docs/design/house.md")
MARK = "<!-- written by scripts/house.py -->"
AXES = {
    "`parallel.context`": r"\bparallel\.context\b|\bcontext_parallel\b|\bcontext_degrees?\b",
    "`sharding.parameters`": r"\bsharding\.parameters\b|\bparameter_shards?\b",
    "`lora.rank`": r"\blora\b",
    "`train.batch`": r"\btrain\.batch\b|\bglobal_batch\b",
}
"""Key of a request -> what a module says that knows of it."""
STARTS = {
    "import windlass": ("-c", "import windlass"),
    "windlass --help": ("-m", "windlass", "--help"),
}
REPEATS = 5


class Room(NamedTuple):
    """What a room is made of."""

    modules: int
    lines: int
    code: int
    """Lines that hold code: no docstring, no comment, not blank."""
    functions: int
    longest: int
    """Lines of its longest function."""


def measure_rooms() -> dict[str, Room]:
    """The rooms of the package; modules at its root count as `base`."""
    sources: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        name = parts[0] if len(parts) > 1 else "base"
        sources.setdefault(name, []).append(path.read_text(encoding="utf-8"))
    return {name: _room(texts) for name, texts in sources.items()}


def _room(texts: list[str]) -> Room:
    functions = [
        node.end_lineno - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    return Room(
        modules=len(texts),
        lines=sum(text.count("\n") for text in texts),
        code=sum(_code_lines(text) for text in texts),
        functions=len(functions),
        longest=max(functions, default=0),
    )


def _code_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor a string that stands alone."""
    skipped = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    )  # fmt: skip
    lines: set[int] = set()
    alone = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL):
            alone = True
        if token.type in skipped or (alone and token.type == tokenize.STRING):
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        alone = False
    return len(lines)


def axis_files() -> dict[str, Counter[str]]:
    """Files of each room that know of an axis."""
    reach: dict[str, Counter[str]] = {}
    for name, pattern in AXES.items():
        reach[name] = Counter(
            path.relative_to(SOURCE).parts[0]
            for path in sorted(SOURCE.rglob("*.py"))
            if re.search(pattern, path.read_text(encoding="utf-8"))
        )
    return reach


def start_seconds() -> dict[str, float]:
    """The shortest of some starts of each command, in turn."""
    best = dict.fromkeys(STARTS, float("inf"))
    for _ in range(REPEATS):
        for name, arguments in STARTS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def report() -> str:
    """All measures as Markdown."""
    rooms = measure_rooms()
    total = Room(*(sum(column) for column in list(zip(*rooms.values(), strict=True))[:4]), 0)
    total = total._replace(longest=max(room.longest for room in rooms.values()))
    lines = [
        "| room | modules | lines | of code | functions | longest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, room in [*sorted(rooms.items(), key=lambda item: -item[1].lines), ("all", total)]:
        lines.append(f"| {name} | " + " | ".join(f"{number:,}" for number in room) + " |")
    lines += ["", "| an axis | files | rooms |", "|---|--:|---|"]
    for name, files in axis_files().items():
        where = ", ".join(f"{room} {count}" for room, count in files.most_common())
        lines.append(f"| {name} | {files.total()} | {where} |")
    lines += ["", "| start, best of five | seconds |", "|---|--:|"]
    lines += [f"| `{name}` | {seconds:.2f} |" for name, seconds in start_seconds().items()]
    return "\n".join(lines)


def main() -> None:
    """Prints the measures, or writes them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help=f"write them into {PAGE}")
    text = report()
    if parser.parse_args().page:
        head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(f"{head}{MARK}\n\n{text}\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
