"""Chat templates render and mark what transformers renders and marks."""

import json
from pathlib import Path

import pytest

from chat_texts import CONVERSATIONS, TEMPLATES, save_tokenizer
from windlass.data.chat import (
    ChatRows,
    ChatTemplate,
    encode_documents,
    encode_question,
    find_chat_template,
)
from windlass.data.readers import TextDocument, UnreadableDocument
from windlass.data.tokenizer import load_tokenizer
from windlass.errors import DataError

SPECIAL = {"bos_token": "<s>", "eos_token": "<|end|>"}


def rows(source: str) -> ChatRows:
    return ChatRows(ChatTemplate(name="`test`", source=source, special_tokens=SPECIAL))


def document(source: str, row: dict[str, object]) -> TextDocument | UnreadableDocument:
    return rows(source).document("row", "row", row)


def learned(source: str, row: dict[str, object]) -> list[str]:
    found = document(source, row)
    assert isinstance(found, TextDocument), found
    return [found.text[span.start : span.end] for span in found.targets or ()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(name: str, tmp_path: Path):
    from transformers import PreTrainedTokenizerFast

    template, marks = TEMPLATES[name], "marks" in name
    path = save_tokenizer(tmp_path, template)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = find_chat_template(str(path), None)
    tokenizer = load_tokenizer(path)
    for messages in CONVERSATIONS:
        theirs = oracle.apply_chat_template(messages, tokenize=False)
        ours = ChatRows(found).document("row", "row", {"messages": messages})
        assert isinstance(ours, TextDocument), ours
        assert ours.text == theirs
        (encoded,) = encode_documents(tokenizer, [ours])
        expected = oracle.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=marks
        )
        assert encoded.ids.tolist() == expected["input_ids"]
        if marks:
            assert (encoded.weights > 0).astype(int).tolist() == expected["assistant_masks"]
        prompt = oracle.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert found.render(messages[:-1], generation_prompt=True).text == prompt


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "marks" not in name])
def test_without_marks_an_answer_is_what_its_turn_adds_up_to_its_end_mark(name: str):
    for messages in CONVERSATIONS:
        end = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "instruct": "<|end|>"}[name]
        answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
        found = learned(TEMPLATES[name], {"messages": messages})
        assert all(answer.endswith(end) for answer in found)
        assert [answer.removesuffix(end).strip() for answer in found] == answers


def test_marked_and_prefix_answers_of_one_template_are_the_same():
    for messages in CONVERSATIONS:
        row = {"messages": messages}
        assert learned(TEMPLATES["chatml"], row) == learned(TEMPLATES["chatml-marks"], row)


def test_a_prompt_is_read_and_its_completion_learned_with_the_end_of_text():
    row: dict[str, object] = {"prompt": "2 + 2 = ", "completion": "4"}
    assert learned(TEMPLATES["chatml"], row) == ["4<|end|>"]
    chat = {
        "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "completion": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
    }
    assert learned(TEMPLATES["chatml"], chat) == ["d<|im_end|>"]


@pytest.mark.parametrize(("key", "read", "learn"), [("weight", 0, 1), ("train", False, True)])
@pytest.mark.parametrize("name", ["chatml", "chatml-marks"])
def test_an_answer_of_weight_0_is_read_and_not_learned(
    name: str, key: str, read: object, learn: object
):
    messages: list[dict[str, object]] = [dict(turn) for turn in CONVERSATIONS[2]]
    messages[2][key], messages[4][key] = read, learn
    answers = [messages[index]["content"] for index in (4, 6)]
    row: dict[str, object] = {"messages": messages}
    assert learned(TEMPLATES[name], row) == [f"{answer}<|im_end|>" for answer in answers]


def test_an_answer_counts_as_much_as_its_weight_says():
    messages: list[dict[str, object]] = [dict(turn) for turn in CONVERSATIONS[2]]
    messages[2]["weight"], messages[4]["weight"] = 0.5, 2
    found = document(TEMPLATES["chatml"], {"messages": messages})
    assert isinstance(found, TextDocument)
    assert [span.weight for span in found.targets or ()] == [0.5, 2.0, 1.0]


def test_the_bytes_of_targets_are_those_of_the_answers_text():
    row = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "é日🙂"}]
    }
    found = document(TEMPLATES["chatml"], row)
    assert isinstance(found, TextDocument)
    from windlass.data.tokenizer import byte_tokenizer

    (encoded,) = encode_documents(byte_tokenizer(), [found])
    assert encoded.lengths[encoded.weights > 0].sum() == len("é日🙂<|im_end|>".encode())
    assert encoded.lengths.sum() == found.nbytes


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer: none of its 1 messages"),
        ({"messages": [{"role": "assitant", "content": "a"}]}, "did you mean `assistant`?"),
        ({"messages": [{"role": "assistant"}]}, "message 0 has no `content`"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "has a part of the type a int"),
        ({"messages": [{"role": "assistant", "content": 1}]}, "has a int as `content`"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "weight above 0"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": -1}]}, "the weight -1;"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": "x"}]}, "the weight x;"),
        ({"messages": ["a"]}, "message 0 is a text, not an object"),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": {"role": "user"}}, "`messages` is an object, not a list"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": "a", "completion": []}, "`completion` is an empty list, not a list of"),
        ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, '`train` = "no"'),
        ({"prompt": "a", "completion": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_a_row_that_is_no_conversation_says_why(row: dict[str, object], words: str):
    found = document(TEMPLATES["chatml"], row)
    assert isinstance(found, UnreadableDocument)
    assert found.message.startswith("row: ")
    assert words in found.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_cannot_do_is_the_fault_of_a_row(source: str, words: str):
    found = document(source, {"messages": CONVERSATIONS[0]})
    assert isinstance(found, UnreadableDocument)
    assert "chat template `test`: " in found.message
    assert words in found.message


def test_a_template_that_drops_earlier_answers_needs_marks():
    source = "{{ messages[-1]['role'] + messages[-1]['content'] }}"
    found = document(source, {"messages": CONVERSATIONS[1]})
    assert isinstance(found, UnreadableDocument)
    assert "mark answers in the template with `{% generation %}`" in found.message


def test_a_jinja_file_goes_before_the_configuration_and_a_wanted_one_before_both(tmp_path: Path):
    path = str(save_tokenizer(tmp_path, TEMPLATES["chatml"]))
    assert "tokenizer_config.json" in find_chat_template(path, None).name
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}", encoding="utf-8")
    assert find_chat_template(path, None).source == "{{ eos_token }}"
    assert "im_start" in find_chat_template(path, "chatml").source
    assert find_chat_template(path, None).special_tokens == SPECIAL


def test_without_a_template_one_stands_in_and_is_named(tmp_path: Path):
    assert find_chat_template("byte", None).name == "`plain`, since the tokenizer has none"
    path = str(save_tokenizer(tmp_path, None))
    assert find_chat_template(path, None).name.startswith("`chatml`, since the tokenizer has its")
    messages = CONVERSATIONS[0]
    for wanted in ("plain", "chatml"):
        template = find_chat_template("byte", wanted)
        assert len(template.render(messages).answers) == 1
        prompt = template.render(messages[:-1], generation_prompt=True).text
        assert template.render(messages).text.startswith(prompt)


def test_a_template_that_is_none_says_what_is_wrong(tmp_path: Path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(DataError, match=r"is no Jinja template: line 1"):
        find_chat_template("byte", str(path))
    with pytest.raises(DataError, match=r"write `plain`, `chatml`, or the path"):
        find_chat_template("byte", "chatlm")
    tokenizer = save_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(DataError, match="holds a JSON list, not an object"):
        find_chat_template(str(tokenizer), None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_question_is_asked_as_transformers_asks_it_also_by_a_template_that_was_saved(
    name: str, tmp_path: Path
):
    from transformers import PreTrainedTokenizerFast

    path = save_tokenizer(tmp_path, TEMPLATES[name])
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template(
        [{"role": "user", "content": "Who?"}], add_generation_prompt=True
    )["input_ids"]
    (run := tmp_path / "run").mkdir()
    tokenizer, template = load_tokenizer(path), find_chat_template(str(path), None)
    tokenizer.save(run / "tokenizer.json")
    template.save(run)

    saved = find_chat_template(str(run / "tokenizer.json"), None)

    assert encode_question(tokenizer, saved, [{"role": "user", "content": "Who?"}]) == expected


_TURN = "{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}"
_LAST_USER = (
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_DROPS_THOUGHTS = (
    _LAST_USER + "{% for message in messages %}{% set text = message.content %}"
    "{% if message.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    + _TURN + "{% endfor %}" + _PROMPT
)  # fmt: skip
_EMPTY_THOUGHT_LAST = (
    "{% for message in messages %}{% set text = message.content %}"
    "{% if message.role == 'assistant' and loop.last %}"
    "{% set text = '<think>\\n\\n</think>\\n\\n' + text %}{% endif %}"
    + _TURN + "{% endfor %}" + _PROMPT
)  # fmt: skip
_END_LAST = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if loop.last %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def dialogue(*answers: str) -> dict[str, object]:
    turns = [("user", "Sure?"), ("assistant", "")] * len(answers)
    given = iter(answers)
    return {"messages": [{"role": role, "content": text or next(given)} for role, text in turns]}


def test_an_answer_whose_thought_is_left_out_is_read_and_counted():
    row = dialogue("<think>\none\n</think>\n\nYes.", "<think>\ntwo\n</think>\n\nNo.")
    assert learned(_DROPS_THOUGHTS, row) == ["<think>\ntwo\n</think>\n\nNo.<|im_end|>"]
    found = document(_DROPS_THOUGHTS, row)
    assert isinstance(found, TextDocument)
    assert found.read_answers == 1


def test_an_answer_that_ends_or_begins_otherwise_where_it_is_the_last_is_learned_as_rendered():
    row = dialogue("Yes.", "No.")
    empty = "<think>\n\n</think>\n\n"
    assert learned(_EMPTY_THOUGHT_LAST, row) == ["Yes.<|im_end|>", f"{empty}No.<|im_end|>"]
    assert learned(_END_LAST, row) == ["Yes.", "No.<|end|>"]


def test_the_date_that_a_template_tells_is_that_of_the_request():
    source = "{{ strftime_now('%d %b %Y') }}" + _END_LAST
    template = ChatTemplate(name="t", source=source, special_tokens=SPECIAL, date="2024-07-26")
    assert template.render(CONVERSATIONS[0]).text.startswith("26 Jul 2024user: ")
    other = ChatTemplate(name="t", source=source, special_tokens=SPECIAL, date="2024-07-27")
    assert template.fingerprint != other.fingerprint


def test_variables_of_the_request_and_of_a_row_reach_the_template():
    source = "{% if deep is defined %}{{ deep }}{% endif %}" + _END_LAST
    template = ChatTemplate(
        name="t", source=source, special_tokens=SPECIAL, variables={"deep": "some "}
    )
    row = {"messages": CONVERSATIONS[0]}
    texts = [
        ChatRows(template).document("row", "row", row | more)
        for more in ({}, {"chat_template_kwargs": {"deep": "much "}})
    ]
    starts = [text.text.partition(" ")[0] for text in texts if isinstance(text, TextDocument)]
    assert starts == ["some", "much"]


def test_a_template_for_tools_renders_the_rows_that_have_some(tmp_path: Path):
    from transformers import AutoTokenizer

    path = save_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "\n  a\n{% if 1 %}\n  b\n{% endif %}\n"},
        {"name": "tool_use", "template": "  {{ tools | tojson }}\n"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template, oracle = find_chat_template(str(path), None), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        theirs = oracle.apply_chat_template(CONVERSATIONS[0], tools=tools, tokenize=False)
        assert template.render(CONVERSATIONS[0], tools).text == theirs


QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
FORMS: list[dict[str, object]] = [
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    {"conversations": [QUESTION, ANSWER]},
    {"instruction": "2 + 2?", "input": "", "output": "4"},
    {"question": "2 + 2?", "answer": "4"},
    {"prompt": [QUESTION], "completion": "4"},
    {"messages": [QUESTION, {"role": "model", "content": "4"}]},
    {"messages": [QUESTION, ANSWER], "prompt": "2 + 2?", "id": 7},
    {"messages": json.dumps([QUESTION, ANSWER])},
    {"messages": [{**QUESTION, "content": [{"type": "text", "text": "2 + 2?"}]}, ANSWER]},
]


@pytest.mark.parametrize("row", FORMS, ids="-".join)
def test_a_row_of_each_form_of_the_hub_is_the_same_conversation(row: dict[str, object]):
    plain = document(TEMPLATES["chatml"], {"messages": [QUESTION, ANSWER]})
    columns = rows(TEMPLATES["chatml"]).columns(tuple(row))
    assert not isinstance(columns, str)
    assert document(TEMPLATES["chatml"], {name: row[name] for name in columns}) == plain


def test_an_instruction_has_its_input_below_and_its_system_prompt_and_history_before():
    row = {
        "system": "Be brief.", "history": [["Hello", "Hi"]],
        "instruction": "Add.", "input": "2 + 2", "output": "4",
    }  # fmt: skip
    turns = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Add.\n\n2 + 2"},
        ANSWER,
    ]  # fmt: skip
    expected = document(TEMPLATES["chatml"], {"messages": turns})
    assert document(TEMPLATES["chatml"], row) == expected


def test_a_result_of_a_function_reaches_the_template_and_a_call_needs_no_content():
    turns: list[dict[str, object]] = [
        dict(QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "function", "name": "add", "content": "4"},
        dict(ANSWER),
    ]
    found = find_chat_template("byte", "plain")
    made = ChatRows(found).document("row", "row", {"messages": turns})
    assert isinstance(made, TextDocument)
    assert "function:\n4" in made.text
    assert '[{"function": {"name": "add"}}]' in made.text
