"""The endpoints of OpenAI's API in a running server, asked by the official client and without."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from penstock.serving import text_endpoints
from penstock.serving.text_endpoints import MOST_BYTES
from tests.support.text_server import (
    Gate,
    client_of,
    events,
    metrics,
    post,
    raw_post,
    text_model,
    text_serving,
)
from tests.support.timing import wait_until
from tests.support.word_texts import letter_tokenizer, likeliest

MESSAGES = [{"role": "user", "content": "w5 w3 w9"}]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CHAT = {"model": "words", "messages": MESSAGES, **GREEDY}


def text_of(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


BEHIND_CHAT = text_of(likeliest([5, 3, 9, 2], 6))
BEHIND_TEXT = text_of(likeliest([5, 3, 9], 6))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    letters = text_model("letters", letter_tokenizer())
    with text_serving(text_model(), letters) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def test_client_lists_and_finds_models(client):
    assert [model.id for model in client.models.list()] == ["words", "letters"]
    model = client.models.retrieve("letters")
    assert (model.id, model.object, model.owned_by) == ("letters", "model", "penstock")
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.models.retrieve("other")


def test_client_gets_the_answer_of_a_chat(client):
    answer = client.chat.completions.create(
        model="words",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=6,
        n=2,
        user="me",
        extra_body={"ignore_eos": True},
    )
    assert [choice.message.content for choice in answer.choices] == [BEHIND_CHAT] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


def test_settings_of_the_model_are_those_of_requests_without_them() -> None:
    model = text_model()
    model.generator.defaults |= {"temperature": 0.0, "beams": 2, "no_repeat_ngram_size": 1}
    wanted = model.generator.generate([5, 3, 9], max_tokens=4).text
    request = {"prompt": [5, 3, 9], "max_tokens": 4}
    with text_serving(model) as (url, _):
        _, answer, _ = post(url, "completions", request)
        assert answer["choices"][0]["text"] == wanted
        # More texts than beams: they are drawn.
        status, answer, _ = post(url, "completions", {**request, "temperature": 1, "n": 3})
        assert (status, len(answer["choices"])) == (200, 3)
        status, answer, _ = post(url, "completions", {**request, "n": 3})
        assert (status, answer["error"]["message"]) == (400, "count=3 is more than beams=2")


def test_client_gets_the_pieces_of_a_stream(client):
    stream = client.chat.completions.create(
        model="words",
        messages=MESSAGES,
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    first, *chunks, end, last = stream
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == [
        f" {word}" for word in BEHIND_CHAT.split()
    ]
    assert end.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.total_tokens == 10


def test_stream_of_several_texts_has_all_of_them_and_ends_with_done(url):
    *chunks, done = events(
        url, "completions", {"prompt": ["w5 w3 w9", "w7"], "n": 2, **GREEDY, "model": "words"}
    )
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    other = text_of(likeliest([7], 6))
    assert texts == {0: BEHIND_TEXT, 1: BEHIND_TEXT, 2: other, 3: other}
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 4


def test_completions_take_tokens_and_give_logprobs(client):
    answer = client.completions.create(
        model="words", prompt=[5, 3, 9], temperature=0, max_tokens=2, logprobs=2
    )
    (choice,) = answer.choices
    tokens = likeliest([5, 3, 9], 2)
    assert choice.logprobs.tokens == [f"w{token}" for token in tokens]
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2, 2]
    assert max(choice.logprobs.token_logprobs) < 0


def test_client_gets_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(
        model="words", messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert ["".join(map(chr, token.bytes)) for token in content] == [t.token for t in content]
    for token in content:
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 3


def test_stop_texts_and_biases_shape_the_answer(url):
    word = BEHIND_CHAT.split()[0]
    status, answer, _ = post(url, "chat/completions", {**CHAT, "stop": [word]})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert word not in answer["choices"][0]["message"]["content"]
    bias = {word.removeprefix("w"): -100}
    _, answer, _ = post(url, "chat/completions", {**CHAT, "logit_bias": bias})
    assert word not in answer["choices"][0]["message"]["content"].split()


def test_seed_gives_the_same_text_again(url):
    asked = {**CHAT, "temperature": 2, "seed": 7}
    one, two = (post(url, "chat/completions", asked)[1] for _ in range(2))
    assert one["choices"] == two["choices"]


def test_tools_reach_the_template(url):
    asked = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = post(url, "chat/completions", asked)[1]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["choices"][0]["message"]["content"] == text_of(likeliest([5, 3, 9, 9, 2], 6))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[0-9]{4}"},
        {"grammar": "start: /[0-9]{4}/"},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "schema": {"type": "integer", "minimum": 1000, "maximum": 9999},
                },
            }
        },
    ],
)
def test_text_has_the_form_that_was_asked_for(url, form):
    asked = {"model": "letters", "prompt": "a", "max_tokens": 20, "temperature": 1, "seed": 3}
    if "response_format" in form:
        asked |= {"temperature": 0}
    status, answer, _ = post(url, "completions", {**asked, **form})
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["text"].strip()) == 4 and json.loads(choice["text"].lstrip("0 ") or "0") >= 0


def test_concurrent_requests_get_the_answers_of_each_alone(url):
    prompts = [[i, 2 * i % 50, 7] for i in range(1, 9)]

    def ask(prompt: list[int]) -> str:
        asked = {
            "model": "words",
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        return post(url, "completions", asked)[1]["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(ask, prompts)]
    assert answers == [text_of(likeliest(prompt, 12)) for prompt in prompts]


WRONG = [
    ("completions", {"prompt": "w1", "model": "words", "foo": 1}, 400, "foo", "unknown_parameter"),
    ("completions", {"prompt": "w1", "model": "other"}, 404, "model", "model_not_found"),
    ("completions", {"prompt": "w1"}, 400, "model", None),
    ("completions", {"prompt": "w1", "model": "words", "temperature": "x"}, 400, "temperature", None),
    ("completions", {"prompt": "w1 " * 300, "model": "words"}, 400, None, None),
    ("completions", {"prompt": "w1", "model": "letters", "grammar": "start: ("}, 400, None, None),
    ("completions", {"prompt": "a", "model": "letters", "json_schema": {"$ref": "#"}}, 400, None, None),
    ("completions", {"prompt": [1, 50], "model": "words"}, 400, "prompt", None),
    ("completions", [], 400, None, None),
    ("chat/completions", {"model": "words", "messages": [{"role": 1, "content": ""}]}, 400, None, None),
    ("chat/completions", {"model": "letters", "messages": MESSAGES}, 400, None, None),
    ("embeddings", {"model": "words", "input": "w1"}, 404, "model", "model_not_found"),
    ("responses", {"model": "words", "input": "w1"}, 404, None, None),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "document", "status", "param", "code"), WRONG)
def test_errors_have_the_form_of_the_interface(url, path, document, status, param, code, stream):
    if stream and isinstance(document, dict) and "completions" in path:
        document = {**document, "stream": True}
    got, answer, _ = post(url, path, document)
    error = answer["error"]
    assert (got, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error" and error["message"]


def test_client_raises_what_the_server_says(client):
    with pytest.raises(openai.BadRequestError, match="top_p=3") as refused:
        client.completions.create(model="words", prompt="w1", top_p=3)
    assert refused.value.param == "top_p"


def test_long_bodies_are_read_on_a_thread_and_bounded(url, monkeypatch):
    long = "w5 " * 10_000
    assert post(url, "completions", {"model": "words", "prompt": long})[0] == 400
    monkeypatch.setattr("penstock.serving.app.MOST_BYTES", 100)
    status, answer, _ = post(url, "completions", {"model": "words", "prompt": long})
    assert (status, answer["error"]["message"]) == (413, "the request is larger than 100 bytes")
    assert MOST_BYTES == text_endpoints.MOST_BYTES > 1 << 20


def test_full_queue_is_429_and_a_client_that_hangs_up_ends_its_text():
    model = text_model(running=1, queue=1)
    gate = Gate(model)
    asked = {"prompt": [1, 2], **GREEDY}
    with text_serving(model) as (url, _):
        running = raw_post(url, "completions", asked)
        wait_until(lambda: model.counts.running == 1)
        queued = raw_post(url, "completions", {**asked, "stream": True})
        wait_until(lambda: model.counts.queued == 1)
        status, answer, headers = post(url, "completions", asked)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer["error"]["code"] == "rate_limit_exceeded"
        queued.close()
        wait_until(lambda: model.counts.queued == 0)
        running.close()
        wait_until(lambda: model.counts.running == 0)
        gate.opened.set()
        assert post(url, "completions", asked)[0] == 200
        wait_until(lambda: not model.generator.stepper._engine.holding)
        assert metrics(url)['penstock_text_refused_total{model="words",version="1"}'] == 1


@pytest.mark.parametrize("reset", [False, True])
def test_client_that_hangs_up_in_a_stream_ends_its_text(reset):
    model = text_model()
    gate = Gate(model)
    with text_serving(model) as (url, _):
        gate.opened.set()
        asked = {"prompt": [1, 2], "max_tokens": 190, "stream": True, "ignore_eos": True}
        reading = raw_post(url, "completions", asked)
        assert b"200 OK" in reading.recv(1 << 16)
        gate.opened.clear()
        if reset:
            reading.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        reading.close()

        def ended() -> bool:
            # A client that has closed its connection in order resets it when it gets more.
            gate.opened.set()
            gate.opened.clear()
            return model.counts.running == 0

        wait_until(ended)
        gate.opened.set()
        wait_until(lambda: not model.generator.stepper._engine.holding)
        assert model.counts.generated_tokens < 190


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_ends_a_text(stream):
    model = text_model()
    gate = Gate(model)
    gate.opened.set()
    model.generator._source = model.generator._source._replace(context=None)
    runner = model.generator.stepper._engine.runner
    run, steps = runner.run, []

    def late(pieces):
        steps.append(pieces)
        if len(steps) == 3:
            for piece in pieces:
                piece.sequence.stop.deadline = 0
        return run(pieces)

    runner.run = late
    with text_serving(model) as (url, _):
        asked = {"prompt": [1, 2], "max_tokens": 100, "ignore_eos": True, "timeout": 25}
        if stream:
            *_, error = events(url, "completions", asked)
        else:
            status, error, _ = post(url, "completions", asked)
            assert status == 504
        assert (error["error"]["type"], error["error"]["code"]) == ("timeout_error", "timeout")


def test_metrics_count_tokens_and_pages():
    model = text_model()
    with text_serving(model) as (url, _):
        asked = {"prompt": [*range(1, 41)], **GREEDY}
        for _ in range(2):
            assert post(url, "completions", asked)[0] == 200
        found = {
            name.removeprefix("penstock_").replace('{model="words",version="1"}', ""): value
            for name, value in metrics(url).items()
        }
    assert found["text_prompt_tokens_total"] == 80
    assert found["text_generated_tokens_total"] == 12
    assert found["text_prefixes_total"] == 32
    assert found["text_first_token_seconds_count"] == found["text_queue_seconds_count"] == 2
    assert found["text_between_tokens_seconds_count"] == 10
    assert found["text_tokens_in_flight"] == found["text_running"] == found["text_queued"] == 0
    assert found['text_pages{model="words",state="kept",version="1"}'] > 0


def test_server_without_models_for_texts_has_no_such_endpoints(tmp_path):
    with text_serving() as (url, _):
        status, answer, _ = post(url, "completions", {"prompt": "w1"})
        assert (status, answer["error"]["code"]) == (404, None)


def test_description_has_the_endpoints(url):
    import urllib.request

    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        paths = json.loads(response.read())["paths"]
    assert paths["/v1/chat/completions"]["post"]["summary"].startswith("Generate the next message")
    reference = paths["/v1/completions"]["post"]["responses"]["default"]["content"]
    assert reference["application/json"]["schema"]["$ref"].endswith("TextError")
    with urllib.request.urlopen(url) as response:
        assert "/v1/models" in response.read().decode()


def test_model_without_a_template_says_so(url):
    answer = post(url, "chat/completions", {"model": "letters", "messages": MESSAGES})[1]
    assert "no chat template" in answer["error"]["message"]
