"""Translates a plan into the configuration of an engine, and back, by the rows of its file."""

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.engines.config_text import Value, config_text, read_config
from windlass.engines.engine_file import EngineFile, Row, Scalar, StageTokens
from windlass.engines.flat_plan import Fact, neutral

Config = dict[str, dict[str, Value]]
"""Values by file and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsayable:
    """A field of a plan that an engine has no word for."""

    fact: str
    value: Fact
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A plan in the words of an engine."""

    engine: EngineFile
    files: Mapping[str, str]
    """Text of each file of the configuration, by name."""
    rows: tuple[tuple[str, str, str, str], ...]
    """Field of the plan, its value, what it became, and what else a reader should know."""
    unsayable: tuple[Unsayable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """What a configuration of an engine says."""

    facts: Mapping[str, Fact]
    unread: tuple[str, ...]
    """Keys that no row of the engine's file explains, each as `file: key`."""


def translate(facts: Mapping[str, Fact], engine: EngineFile) -> Translation:
    """A plan in the words of an engine, with all that it has no words for."""
    config: Config = {name: dict(constants) for name, constants in engine.files.items()}
    rows, unsayable = [], []
    for name, value in facts.items():
        row = engine.fields.get(name)
        if row is None:
            if not _needs_no_word(name, value, engine):
                lacks = f"`{engine.label}` has no field for it"
                unsayable.append(Unsayable(fact=name, value=value, because=lacks))
            continue
        if value is None:
            continue
        written = _written(row, value)
        if written is None:
            words = ", ".join(row.values or map(str, row.only or ()))
            because = row.because or f"`{engine.label}` says {words} alone"
            unsayable.append(Unsayable(fact=name, value=value, because=because))
            continue
        file = row.file or engine.main_file
        config.setdefault(file, {}).update(written)
        words = ", ".join(f"`{key}` = {_shown(each)}" for key, each in written.items())
        rows.append((name, _shown(value), words or "said by nothing", row.note))
    texts = {name: config_text(name, content) for name, content in config.items()}
    return Translation(engine=engine, files=texts, rows=tuple(rows), unsayable=tuple(unsayable))


def _needs_no_word(name: str, value: Fact, engine: EngineFile) -> bool:
    """Whether a fact without a row is as every engine has it, or follows from others."""
    if name.startswith("model.") and engine.model != "fields":
        return True
    known, plain = neutral(name)
    return value == plain if known or name.startswith("model.") else True


def _written(row: Row, value: Fact) -> dict[str, Value] | None:
    """What a row writes for a value; None if the engine cannot say it."""
    if row.tokens is not None and isinstance(value, tuple):
        return {str(row.key): _stage_words(row.tokens, value)}
    if isinstance(value, tuple) or value is None:
        return None
    if row.values is not None:
        written = row.values.get(_word(value))
        return None if written is None else dict(written)
    if value in row.never or (row.only is not None and value not in row.only):
        return None
    return {} if row.key is None else {row.key: value}


def _stage_words(tokens: StageTokens, stages: tuple[tuple[int, int], ...]) -> Value:
    layers = stages[-1][1]
    names = [(tokens.first,), *((tokens.block.format(i),) for i in range(layers - 2)), tokens.last]
    if tokens.nested:
        return [list(sum(names[first:end], ())) for first, end in stages]
    words = [tokens.join.join(sum(names[first:end], ())) for first, end in stages]
    return words if tokens.between is None else tokens.between.join(words)


def read_engine_config(texts: Mapping[str, str], engine: EngineFile) -> ReadConfig:
    """What the files of a configuration say, in the facts of a plan.

    Args:
        texts: the text of each file, by name.
        engine: the version that they are for.

    Raises:
        RequestError: a file has no such form.
        PlanError: a field has a value that no plan has.
    """
    config = {name: read_config(name, text) for name, text in texts.items()}
    used = {(file, key) for file, constants in engine.files.items() for key in constants}
    facts: dict[str, Fact] = {}
    for name, row in engine.fields.items():
        file = row.file or engine.main_file
        content = config.get(file, {})
        facts[name] = _read(row, content)
        keys = {key for written in (row.values or {}).values() for key in written}
        used |= {(file, key) for key in (*keys, row.key) if key is not None}
    unread = [
        f"{file}: `{key}`" for file, content in config.items() for key in content
        if (file, key) not in used
    ]  # fmt: skip
    return ReadConfig(facts=facts, unread=tuple(unread))


def _read(row: Row, content: Mapping[str, Value]) -> Fact:
    if row.values is not None:
        keys = {key for written in row.values.values() for key in written}
        if not keys & set(content):
            return row.default
        for word, written in row.values.items():
            if all(content.get(key, False) == written.get(key, False) for key in keys):
                return _value(word)
        return row.default
    if row.key is None or row.key not in content:
        return row.default
    value = content[row.key]
    if row.tokens is not None:
        return _stage_ranges(row.tokens, value)
    return value if not isinstance(value, list) else " ".join(map(str, value))


def _stage_ranges(tokens: StageTokens, value: Value) -> Fact:
    """Ranges of layers that words for stages name."""
    text = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    words = text if tokens.between is None else text[0].split(tokens.between)
    ranges, start = [], 0
    for index, word in enumerate(words):
        count = len(word.split(tokens.join)) if tokens.join else len(word)
        # What follows the last block is one layer of ours, whatever its parts are called.
        count -= len(tokens.last) - 1 if index == len(words) - 1 else 0
        ranges.append((start, start + count))
        start += count
    return tuple(ranges)


def _word(value: Fact) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(word: str) -> Scalar:
    """A value of a plan, as a key of a row's table names it."""
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdigit() else word


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} stages"
    return str(value).lower() if isinstance(value, bool) else str(value)
