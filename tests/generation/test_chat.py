"""Texts that chat templates make of messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from penstock.core.errors import InvalidInput, InvalidModel
from penstock.generation.chat import ChatTemplate, checked_messages
from penstock.generation.tokenizer import TextTokenizer
from tests.support.tokenizers import trained_tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <Hi> "}]


def test_template_writes_messages_and_beginning_of_answer() -> None:
    text = ChatTemplate(CHATML).render(MESSAGES)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<Hi><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text.endswith(
        ChatTemplate(CHATML).render(MESSAGES, add_generation_prompt=False)[-10:]
        + "<|im_start|>assistant\n"
    )


def test_template_writes_tools_as_json_without_escapes() -> None:
    text = ChatTemplate(CHATML).render(MESSAGES, tools=[{"name": "é<&>'"}])
    assert text.startswith('<|im_start|>system\nTools: {"name": "é<&>\'"}<|im_end|>\n')


def test_template_has_tokens_variables_and_time() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% if enable_thinking %}!{% endif %}{{ eos_token }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    now = datetime(2026, 3, 1)
    assert template.render(MESSAGES, now=now) == "<s>01 Mar 2026</s>"
    text = template.render(MESSAGES, now=now, variables={"enable_thinking": True})
    assert text == "<s>01 Mar 2026!</s>"


def test_template_may_leave_loops_and_mark_answers() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render(MESSAGES) == "Be brief."


def test_template_trims_blocks() -> None:
    text = ChatTemplate("  {% if true %}\nx\n  {% endif %}\ny\n").render(MESSAGES)
    assert text == "x\ny"


def test_exception_of_template_names_its_reason() -> None:
    with pytest.raises(InvalidInput, match="refuses the messages: no role tool"):
        ChatTemplate(CHATML).render([{"role": "tool", "content": "x"}])


def test_undefined_of_template_is_an_error_of_it() -> None:
    with pytest.raises(InvalidInput, match="nothing"):
        ChatTemplate("{{ nothing.at.all }}").render(MESSAGES)


def test_wrong_template_names_its_line() -> None:
    with pytest.raises(InvalidModel, match="line 2"):
        ChatTemplate("a\n{% if %}")


def test_too_long_template_raises() -> None:
    with pytest.raises(InvalidModel, match="characters"):
        ChatTemplate("a" * 1_000_001)


def test_deeply_nested_template_raises() -> None:
    with pytest.raises(InvalidModel):
        ChatTemplate("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")


def test_template_of_tokenizer_has_its_tokens() -> None:
    templates = {"default": "{{ bos_token }}a{{ eos_token }}", "tool_use": "b"}
    tokenizer = TextTokenizer(trained_tokenizer(), start_id=0, end_id=1, chat_templates=templates)
    assert ChatTemplate.of(tokenizer).render(MESSAGES) == "<|start|>a<|end|>"
    assert ChatTemplate.of(tokenizer, tools=True).render(MESSAGES) == "b"


def test_template_of_tokenizer_without_one_raises() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        ChatTemplate.of(TextTokenizer(trained_tokenizer()))


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ("hello", "messages"),
        ([], "no messages"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\]"),
        ([MESSAGES[0], {"role": 1, "content": "x"}], r"messages\[1\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "assistant", "content": None, "tool_calls": "x"}], "tool_calls"),
    ],
)
def test_wrong_messages_raise_with_their_place(messages: Any, place: str) -> None:
    with pytest.raises(InvalidInput, match=place):
        checked_messages(messages)


def test_parts_of_content_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_arguments_of_tool_calls_become_objects() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    message = checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}])[0]
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert calls[0]["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]


@pytest.mark.parametrize(
    "text", ["{{ 1e400 }}", "{{ 'a b' | truncate(-5, true) }}", "{{ 1 / 0 }}", "{{ [1][5:] + 3 }}"]
)
def test_template_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"the chat template cannot be run: [A-Z]"):
        ChatTemplate(text).render(MESSAGES)
