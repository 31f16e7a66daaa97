"""Bodies of requests for texts: what is read, and what is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.serving.text_protocol import (
    FieldError,
    decode_embeddings_request,
    decode_text_request,
    error_object,
)

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return decode_text_request({"model": "m", "messages": MESSAGES, **fields}, True)


def completion(**fields: Any) -> Any:
    return decode_text_request({"model": "m", "prompt": "hello", **fields}, False)


def test_fields_become_options_of_the_generator():
    asked = completion(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=4,
        stop="x",
        n=2,
        best_of=3,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        logprobs=3,
        logit_bias={"12": -100},
        stop_token_ids=[3],
        user="me",
        timeout=2,
    )
    options = asked.options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 7, 0.1)
    assert (options.presence_penalty, options.frequency_penalty) == (1, -1)
    assert (options.repetition_penalty, options.seed, options.stop) == (1.1, 4, ("x",))
    assert (options.count, options.best_of, options.max_tokens, options.min_tokens) == (2, 3, 9, 2)
    assert (options.ignore_end, options.logprobs, options.logit_bias) == (True, 3, {12: -100})
    assert (options.stop_ids, asked.timeout, asked.stream) == ((3,), 2.0, False)


def test_defaults_are_those_of_the_interface():
    asked = completion()
    assert (asked.options.temperature, asked.options.max_tokens) == (1.0, 16)
    assert chat().options.max_tokens is None
    assert chat(seed=-1, top_k=-1).options.seed is None
    assert chat(seed=-5).options.seed == 2**64 - 5
    assert chat(max_tokens=5, max_completion_tokens=7).options.max_tokens == 7


def test_fields_of_chats_are_read():
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = chat(
        tools=tools,
        tool_choice="auto",
        chat_template_kwargs={"a": 1},
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="low",
        parallel_tool_calls=False,
        modalities=["text"],
    )
    assert asked.tools == tools and asked.with_usage and asked.options.logprobs == 2
    assert asked.variables == {"a": 1, "reasoning_effort": "low"}
    assert chat(tools=tools, tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}},
                }
            },
            ("json_schema", '{"type": "null"}'),
        ),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"grammar": "start: /a/"}, ("grammar", "start: /a/")),
        ({"json_schema": {"type": "null"}}, ("json_schema", '{"type": "null"}')),
    ],
)
def test_forms_of_texts_are_read(fields, constraint):
    assert chat(**fields).options.constraint == constraint


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_prompts_are_texts_or_tokens(value, prompts):
    assert completion(prompt=value).prompts == prompts
    assert decode_embeddings_request({"input": value}).texts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": "x"}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"regex": "a", "guided_regex": "b"}, "guided_regex"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"model": 1}, "model"),
        ({"timeout": 0}, "timeout"),
        ({"messages": MESSAGES}, "messages"),
        ({"frequency_penalties": 1}, "frequency_penalties"),
    ],
)
def test_wrong_field_of_completions_is_refused_by_its_name(fields, param):
    with pytest.raises(FieldError) as refused:
        completion(**fields)
    assert refused.value.param == param
    assert param.partition(".")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"functions": []}, "functions"),
    ],
)
def test_wrong_field_of_a_chat_is_refused_by_its_name(fields, param):
    with pytest.raises(FieldError) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": "x"}, "dimensions"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_wrong_field_of_embeddings_is_refused_by_its_name(fields, param):
    with pytest.raises(FieldError) as refused:
        decode_embeddings_request(fields)
    assert refused.value.param == param


def test_body_that_is_no_object_is_refused():
    with pytest.raises(FieldError, match="JSON object"):
        decode_text_request([1], True)


def test_errors_have_types_by_status():
    assert error_object("m", 400, "p", "c") == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    assert error_object("m", 429)["error"]["code"] == "rate_limit_exceeded"
    assert error_object("m", 500)["error"]["type"] == "server_error"


@pytest.mark.parametrize("fields", [{"n": 5}, {"best_of": 5}])
def test_texts_of_all_prompts_are_limited(fields: dict[str, int]) -> None:
    assert len(completion(prompt=["a"] * 409, **fields).prompts) == 409
    with pytest.raises(FieldError, match="410 prompts with n or best_of 5") as error:
        completion(prompt=["a"] * 410, **fields)
    assert error.value.param == "prompt"
