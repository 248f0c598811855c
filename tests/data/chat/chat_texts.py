"""Conversations and templates in the manner of well-known ones, written for these tests."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Turns = list[dict[str, str]]

_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.role == 'assistant' %}GEN{{ message.content + '<|im_end|>' }}END\
{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}\
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Cutting Knowledge Date: ' + ({'year': 2023} | tojson) + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        GEN{{- message['content'] | trim + '<|eot_id|>' }}END
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_INSTRUCT = """\
{%- set ns = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\\n' -%}{%- continue -%}
{%- elif message.role == 'user' -%}{{- '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- elif message.role == 'assistant' -%}{{- ' ' ~ message.content | trim ~ eos_token -}}
{%- else -%}{{- raise_exception('no role ' ~ message.role) -}}{%- endif -%}
{%- endfor -%}
"""


def _unmarked(source: str) -> str:
    return source.replace("GEN", "").replace("END", "")


def _marked(source: str) -> str:
    return source.replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")


TEMPLATES = {
    "chatml": _unmarked(_CHATML),
    "chatml-marks": _marked(_CHATML),
    "llama-3": _unmarked(_LLAMA_3),
    "llama-3-marks": _marked(_LLAMA_3).replace("%}{{-", "%}{{"),
    "instruct": _INSTRUCT,
}


def _turns(*contents: str, system: str | None = None) -> Turns:
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


CONVERSATIONS: list[Turns] = [
    _turns("What is two and two?", "It is four."),
    _turns(
        "Hello", "Hello, what now?", "Naïve café 日本 🙂", " spaces  around \n", system="Be brief."
    ),
    _turns(
        "a", "<b> & 'c' \"d\"", "tell\nme more", "line one\nline two", "thanks", "bye", system=" "
    ),
]


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """A small byte-level tokenizer with special tokens, as transformers saves one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["What is two and two? It is four. Hello, hello."] * 3, trainer)
    names = ("<s>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
