"""Finds the chat template of a tokenizer, or the one that stands in for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windlass.atomic_files import read_regular_file
from windlass.data.chat.chat_template import ChatTemplate
from windlass.data.chat.template_process import TemplateFault
from windlass.data.tokenizer import END_OF_TEXT, load_tokenizer
from windlass.document import read_json_object
from windlass.errors import DataError
from windlass.schema import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE

_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_PLAIN = """\
{%- for message in messages -%}
{{- message['role'] + ':\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
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
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_OWN = {"plain": _PLAIN, "chatml": _CHATML}


def find_chat_template(tokenizer: str, wanted: str | None) -> ChatTemplate:
    """The template that conversations are rendered by.

    Args:
        tokenizer: `byte`, `bpe` or the path of a `tokenizer.json`. Its template is looked for
            beside it: in `chat_template.jinja`, then in `tokenizer_config.json`.
        wanted: `plain`, `chatml` or a path, in place of the tokenizer's; None takes it, or
            `chatml` if the tokenizer has its marks as tokens, or `plain`.

    Raises:
        DataError: there is no such file, or it is no template.
    """
    folder = None if tokenizer in ("byte", "bpe") else Path(tokenizer).expanduser().parent
    config = {} if folder is None else _beside(folder / _CONFIG_FILE)
    name, source = _named(wanted) if wanted is not None else _of_tokenizer(folder, config)
    special_tokens = {} if folder is None else _special_tokens(folder, config)
    if not source:
        name, source = _default(tokenizer)
    if "eos_token" not in special_tokens:
        special_tokens["eos_token"] = _end_of_text(tokenizer)
    template = ChatTemplate(name=name, source=source, special_tokens=special_tokens)
    try:
        template.marks_answers  # noqa: B018  compiles it
    except TemplateFault as fault:
        raise DataError(f"the chat template {name} is no Jinja template: {fault}") from None
    return template


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
        return _named(str(folder / CHAT_TEMPLATE_FILE))
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {each.get("name"): each for each in template if isinstance(each, dict)}
        template = by_name.get("default", {}).get("template")
    return f"of `{folder / _CONFIG_FILE}`", template if isinstance(template, str) else ""


def _default(tokenizer: str) -> tuple[str, str]:
    if tokenizer not in ("byte", "bpe"):
        backend = load_tokenizer(Path(tokenizer).expanduser()).backend
        if all(backend.token_to_id(mark) is not None for mark in _CHATML_MARKS):
            return "`chatml`, since the tokenizer has its marks and no template", _CHATML
    return "`plain`, since the tokenizer has none", _PLAIN


def _end_of_text(tokenizer: str) -> str:
    if tokenizer in ("byte", "bpe"):
        return END_OF_TEXT
    loaded = load_tokenizer(Path(tokenizer).expanduser())
    return str(loaded.backend.id_to_token(loaded.end_of_text))


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer by the names that templates use."""
    found: dict[str, str] = {}
    for names in (_beside(folder / SPECIAL_TOKENS_FILE), config):
        for kind in _SPECIAL_TOKENS:
            value = names.get(f"{kind}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[f"{kind}_token"] = text
    return found


def _beside(path: Path) -> dict[str, Any]:
    """A JSON object beside a tokenizer; an empty one without the file (`Any`: of any kind).

    Raises:
        DataError: the file is no JSON object.
    """
    return read_json_object(path, DataError) if path.exists() else {}
