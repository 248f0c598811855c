"""A chat template comes from anywhere: it ends in little time and memory, whatever it does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from chat_texts import CONVERSATIONS
from windlass.data.chat import ChatRows, ChatTemplate, find_chat_template
from windlass.data.chat.template_process import (
    TemplateFault,
    TemplateLimitFault,
    TemplateLimits,
    TemplateProcess,
)
from windlass.data.readers import Row, TextDocument
from windlass.errors import DataError

LIMITS = TemplateLimits(cpu_seconds=0.3, memory_bytes=2**28)
CONVERSATION = {"messages": CONVERSATIONS[0], "turns": [1]}


def render(source: str, limits: TemplateLimits = LIMITS) -> str:
    (answer,) = TemplateProcess(limits).render(source, [CONVERSATION])
    return str(answer.get("text") or answer)


def doubled(last: str, pair: str = "[n.X, n.X]", start: str = "[1]") -> str:
    """Two equal values that hold each other sixty times over, and what is done with them."""
    steps = "".join(f"{{% set n.{x} = {pair.replace('X', x)} %}}" for x in "ab")
    return (
        f"{{% set n = namespace(a={start}, b={start}) %}}"
        f"{{% for i in range(60) %}}{steps}{{% endfor %}}{last}"
    )


@pytest.mark.parametrize(
    "source",
    [
        doubled("{{ n.a == n.b }}"),
        doubled("{{ n.a in [n.b] }}"),
        doubled("{{ [n.a, n.b] | min }}"),
        doubled("{{ [n.a, n.b] | unique | list }}", pair="(n.X, n.X)", start="(1,)"),
        "{{ 9999999 ** 9999999 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_that_would_not_end_is_ended(source: str):
    begin = time.monotonic()
    with pytest.raises(TemplateLimitFault, match=r"it takes more than 300 ms of processor time"):
        render(source)
    assert time.monotonic() - begin < 30  # on a busy machine


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'long' * 9999999999 }}",
        "{{ 'x' | center(9999999999) }}",
        doubled("", pair="n.X ~ n.X", start="'long'"),
        "{% for i in [[1, 1]] recursive %}{{ loop([[1, 1]] * 99999999) }}{% endfor %}",
    ],
)
def test_a_template_that_would_take_all_memory_is_ended(source: str):
    patient = LIMITS._replace(cpu_seconds=30)  # zeros take time on a busy machine
    with pytest.raises(TemplateLimitFault, match=r"it needs more than 256 MiB of memory"):
        render(source, patient)


def test_a_template_that_makes_more_text_than_a_conversation_is_ended():
    with pytest.raises(TemplateLimitFault, match=r"it makes more than 1.00 KiB of text"):
        render("{{ 'x' * 2000 }}", LIMITS._replace(answer_bytes=1024))


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
    ],
)
def test_a_template_of_300_brackets_is_refused_in_one_sentence(source: str, tmp_path: Path):
    (path := tmp_path / "t.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        find_chat_template("byte", str(path))
    assert str(caught.value) == (
        f"the chat template `{path}` is no Jinja template: it nests too deeply"
    )


def test_a_template_that_takes_long_to_compile_is_ended():
    with pytest.raises(TemplateLimitFault, match="processor time"):
        TemplateProcess(LIMITS).render("{{ 1 + 1 }}" * 200_000, [])


def test_the_row_that_takes_too_much_is_named_also_among_others():
    source = "{% if 'evil' in messages[0].content %}" + doubled("{{ n.a == n.b }}") + "{% endif %}"
    template = ChatTemplate(name="`test`", source=source + "a", special_tokens={}, limits=LIMITS)
    rows = [
        Row(str(number), f"t.jsonl:{number}", {"messages": [
            {"role": "user", "content": "evil" if number == 4 else "good"},
            {"role": "assistant", "content": "a"},
        ]})
        for number in range(9)
    ]  # fmt: skip
    with pytest.raises(DataError) as caught:
        list(ChatRows(template).documents(rows))
    assert str(caught.value) == (
        "t.jsonl:4: the chat template `test`: it takes more than 300 ms of processor time; correct "
        "it, or name another one as `data.chat_template`"
    )


def test_rows_that_are_rendered_together_are_those_rendered_alone():
    template = find_chat_template("byte", "chatml")
    rows = [Row(str(i), str(i), {"messages": CONVERSATIONS[i % 3]}) for i in range(150)]
    rows[70] = Row("70", "70", {"prompt": "a", "completion": "b"})
    chat = ChatRows(template)
    together = list(chat.documents(rows))
    assert together == [chat.document(row.name, row.where, row.values) for row in rows]
    assert all(isinstance(each, TextDocument) for each in together)


def test_a_process_without_a_conversation_ends_and_the_next_conversation_starts_another():
    process = TemplateProcess(LIMITS._replace(idle_seconds=0.05))
    source = "{{ messages[0].content }}"
    process.render(source, [])
    first = process._process
    assert first.wait(timeout=30) == 0
    (answer,) = process.render(source, [CONVERSATION])
    assert answer["text"] == CONVERSATIONS[0][0]["content"]
    assert process._process is not first


def test_a_template_draws_the_same_numbers_again():
    source = "{% for i in range(20) %}{{ range(99) | random }} {% endfor %}"
    process = TemplateProcess(LIMITS)
    assert process.render(source, [CONVERSATION]) == process.render(source, [CONVERSATION])


ENDLESS = """
import signal, sys, windlass.data.chat.template_process as p
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start jobs with it ignored
limits = p.TemplateLimits(cpu_seconds=float(sys.argv[1]))
process = p.TemplateProcess(limits)
process.render("", [])
print(process._process.pid, flush=True)
source = "{{ messages[0].content }}" + sys.argv[2]
process.render(source, [{"messages": [{"role": "user", "content": "a"}], "turns": [0]}])
"""


@pytest.mark.parametrize(("number", "cpu_seconds"), [(signal.SIGINT, 600), (signal.SIGKILL, 1)])
def test_a_template_ends_with_the_process_that_renders_it(
    number: signal.Signals, cpu_seconds: float
):
    """After SIGKILL, which leaves no time to end it, its own limit ends it."""
    command = (sys.executable, "-c", ENDLESS, str(cpu_seconds), doubled("{{ n.a == n.b }}"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while child.cpu_times().user < 0.3:  # it renders
            time.sleep(0.05)
        os.kill(parent.pid, number)
        parent.wait(timeout=60)
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_what_a_template_says_of_itself_is_short():
    with pytest.raises(TemplateFault) as caught:
        ChatTemplate(
            name="`t`", source="{{ raise_exception('x' * 9999999) }}", special_tokens={}
        ).render(CONVERSATIONS[0])
    assert len(str(caught.value)) <= 1000


def test_values_that_json_does_not_hold_are_shown_as_text():
    import datetime as dt

    messages = [{"role": "user", "content": "a", "day": dt.date(2020, 1, 2)}]
    template = ChatTemplate(name="`t`", source="{{ messages[0].day }}", special_tokens={})
    assert template.render(messages).text == "2020-01-02"


def test_without_transformers_one_sentence_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "transformers.py").write_text("raise ImportError('absent')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError) as caught:
        TemplateProcess(LIMITS).render("", [])
    assert str(caught.value) == (
        "chat templates need the package `transformers`; install `windlass[hf]`"
    )
