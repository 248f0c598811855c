"""Finds the chat template of a tokenizer, or the one that stands in for it."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from windlass.atomic_files import read_regular_file
from windlass.data.chat.chat_template import ChatTemplate, tells_date
from windlass.data.chat.template_process import TemplateFault
from windlass.data.tokenizer import END_OF_TEXT, load_tokenizer
from windlass.data.tokenizer_folder import (
    TOKENIZER_CONFIG_FILE,
    special_tokens,
    tokenizer_config,
)
from windlass.errors import DataError
from windlass.schema import CHAT_TEMPLATE_FILE

_TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"

_PLAIN = """\
{%- for message in messages -%}
{{- message['role'] + ':\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] or '' -}}
{%- if message['tool_calls'] -%}{{- message['tool_calls'] | tojson -}}{%- endif -%}
{{- eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{{- '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:\\n' -}}{%- endif -%}
"""

_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] or '' -}}
{%- if message['tool_calls'] -%}{{- message['tool_calls'] | tojson -}}{%- endif -%}
{{- '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_OWN = {"plain": _PLAIN, "chatml": _CHATML}


def find_chat_template(
    tokenizer: str,
    wanted: str | None,
    *,
    variables: Mapping[str, object] | None = None,
    date: str | None = None,
) -> ChatTemplate:
    """The template that conversations are rendered by.

    Args:
        tokenizer: `byte`, `bpe` or the path of a `tokenizer.json`. Its template is looked for
            beside it as transformers does: in `chat_template.jinja`, then in
            `tokenizer_config.json`.
        wanted: `plain`, `chatml` or a path, in place of the tokenizer's; None takes it, or
            `chatml` if the tokenizer has its marks as tokens, or `plain`.
        variables: of the template, such as `enable_thinking`.
        date: the day that it tells, such as `2025-12-31`; None is today.

    Raises:
        DataError: there is no such file, or it is no template.
    """
    folder = None if tokenizer in ("byte", "bpe") else Path(tokenizer).expanduser().parent
    name, source = chat_template_source(tokenizer, wanted)
    special = {} if folder is None else special_tokens(folder)
    added: tuple[str, ...] = ()
    if folder is not None and (folder / Path(tokenizer).name).is_file():
        loaded = load_tokenizer(Path(tokenizer).expanduser())
        special.setdefault("eos_token", str(loaded.backend.id_to_token(loaded.end_of_text)))
        added = tuple(each.content for each in loaded.backend.get_added_tokens_decoder().values())
    special.setdefault("eos_token", END_OF_TEXT)
    if date is None and tells_date(source):
        date = datetime.now().astimezone().date().isoformat()
    template = ChatTemplate(
        name=name, source=source, special_tokens=special, variables=variables or {}, date=date,
        added_tokens=added,
    )  # fmt: skip
    try:
        template.compile()
    except TemplateFault as fault:
        raise DataError(f"the chat template {name} is no Jinja template: {fault}") from None
    return template


def chat_template_source(tokenizer: str, wanted: str | None) -> tuple[str, str]:
    """Name and source of a template, as `find_chat_template` finds it.

    Args:
        tokenizer: `byte`, `bpe` or the path of a `tokenizer.json`.
        wanted: `plain`, `chatml` or a path; None takes the tokenizer's.

    Raises:
        DataError: there is no such file.
    """
    if wanted is not None:
        return _named(wanted)
    folder = None if tokenizer in ("byte", "bpe") else Path(tokenizer).expanduser().parent
    name, source = _of_tokenizer(folder, {} if folder is None else tokenizer_config(folder))
    return (name, source) if source else _default(tokenizer)


def _named(wanted: str) -> tuple[str, str]:
    if wanted in _OWN:
        return f"`{wanted}`", _OWN[wanted]
    try:
        return f"`{wanted}`", read_regular_file(Path(wanted).expanduser()).decode()
    except OSError as error:
        reason = f"{error.strerror}; write `plain`, `chatml`, or the path of a Jinja file"
    except UnicodeDecodeError:
        reason = "not UTF-8"
    raise DataError(f"no chat template `{wanted}`: {reason}")


def _of_tokenizer(folder: Path | None, config: Mapping[str, Any]) -> tuple[str, str]:
    """Name and source of the template beside a tokenizer; an empty source if there is none."""
    if folder is None:
        return "", ""
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        name, usual = _named(str(folder / CHAT_TEMPLATE_FILE))
        path = folder / _TOOLS_TEMPLATE_FILE
        return name, _for_tools(usual, _named(str(path))[1]) if path.is_file() else usual
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): str(each.get("template")) for each in template}
        template = named.get("default")
        if template is not None and "tool_use" in named:
            template = _for_tools(template, named["tool_use"])
    return f"of `{folder / TOKENIZER_CONFIG_FILE}`", template if isinstance(template, str) else ""


def _for_tools(usual: str, with_tools: str) -> str:
    """One template of two, of which a conversation with tools takes the second."""
    # Jinja takes away the line's end behind a block, and the last one of a source.
    parts = (text.removesuffix("\n") for text in (with_tools, usual))
    return "{{% if tools is not none %}}\n{}{{%+ else %}}\n{}{{%+ endif %}}".format(*parts)


def _default(tokenizer: str) -> tuple[str, str]:
    if tokenizer not in ("byte", "bpe"):
        backend = load_tokenizer(Path(tokenizer).expanduser()).backend
        if all(backend.token_to_id(mark) is not None for mark in _CHATML_MARKS):
            return "`chatml`, since the tokenizer has its marks and no template", _CHATML
    return "`plain`, since the tokenizer has none", _PLAIN
