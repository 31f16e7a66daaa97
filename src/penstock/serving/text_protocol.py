"""Text requests in the format of OpenAI's API: completions, chats and embeddings; and its errors.

Unknown fields are refused, since a text generated without them would not be what was requested; so
are values of fields that have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penstock.core.errors import InvalidInput, shortened
from penstock.core.records import dataclass, field
from penstock.core.types import JsonObject
from penstock.generation.options import GenerationOptions

Prompts: TypeAlias = "list[str | list[int]] | list[list[Mapping[str, object]]]"

MOST_TEXTS = 2048
"""the maximum number of texts in an embeddings request, or texts to generate in a completions
request"""
_MOST_LOGPROBS = 20
DEFAULT_TEMPERATURE = 1.0
"""of requests that give none, if the model's files do not either"""
_COMPLETION_TOKENS = 16
"""the default maximum number of tokens of a completion"""

# Fields that do not affect a text, or state the default.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_IGNORED_OF_CHATS = ("parallel_tool_calls",)
# Options by the fields whose names differ.
_NAMED = {"n": "count", "ignore_eos": "ignore_end", "stop_token_ids": "stop_ids"}
_ALIKE = (
    *("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "stop", "grammar", "regex", "json_schema"),
)
_GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}


class FieldError(InvalidInput):
    """A field of a request is invalid. ``param``: its name; ``code``: an error code for clients."""

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class TextAsked:
    """A request for texts. For a chat, the single prompt is its list of messages. ``given`` are the
    options that the request gives, which those of the model's files complete. ``variables`` are
    variables of the chat template, ``timeout`` is in seconds."""

    model: str | None
    prompts: Prompts
    options: GenerationOptions
    is_chat: bool
    stream: bool = False
    with_usage: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    timeout: float | None = None
    given: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddingsAsked:
    """A request for embeddings of texts, each given as a string or as tokens."""

    model: str | None
    texts: Sequence[str | list[int]]
    base64: bool
    dimensions: int | None
    timeout: float | None = None


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> JsonObject:
    """Return the document of an error response."""
    # Clients map the status to an exception, and show the message.
    kinds = {429: ("rate_limit_error", "rate_limit_exceeded"), 504: ("timeout_error", "timeout")}
    kind, usual = kinds.get(
        status, ("invalid_request_error" if status < 500 else "server_error", None)
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


class _Fields:
    """The fields of an object, which are consumed one by one. None counts as omitted."""

    def __init__(self, document: object, place: str = "") -> None:
        if not isinstance(document, Mapping):
            what = (
                f"{place.rstrip('.')} must be an object"
                if place
                else "the body must be a JSON object"
            )
            raise FieldError(place.rstrip(".") or None, what)
        self._left = dict(document)
        self._place = place

    def take(self, name: str) -> object:
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def whole(self, name: str) -> int | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(name, value, "a whole number")
        return value

    def seconds(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(name, value, "a number of seconds above 0")
        return float(min(value, 1e9))

    def inner(self, name: str) -> _Fields | None:
        value = self.take(name)
        return None if value is None else _Fields(value, f"{self._place}{name}.")

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self.take(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return value or {}

    def wrong(self, name: str, value: object, needed: str) -> FieldError:
        place = self._place + name
        return FieldError(place, f"{place}={shortened(repr(value))}: it must be {needed}")

    def refuse(self, name: str, why: str, *but: object) -> None:
        """Consume a field without effect, whose only valid values are those in ``but``."""
        value = self.take(name)
        if value is not None and value not in but:
            place = self._place + name
            raise FieldError(place, f"{place}={shortened(repr(value))}: {why}", "unsupported_value")

    def end(self) -> None:
        """Raise ``FieldError`` for fields that were not consumed."""
        for name in self._left:
            place = f"{self._place}{name}"
            raise FieldError(place, f"unknown field {place!r:.80}", "unknown_parameter")


def decode_text_request(document: object, is_chat: bool) -> TextAsked:
    """Read the body of a request for a chat or for completions. Raises ``InvalidInput``."""
    fields = _Fields(document)
    model, timeout = fields.text("model"), fields.seconds("timeout")
    stream, stream_options = fields.flag("stream"), fields.inner("stream_options")
    with_usage = False
    if stream_options is not None:
        if not stream:
            raise FieldError("stream_options", "stream_options requires stream=true")
        with_usage = stream_options.flag("include_usage")
        stream_options.flag("include_obfuscation")
        stream_options.end()
    for name in (*_IGNORED, *(_IGNORED_OF_CHATS if is_chat else ())):
        fields.take(name)
    given = _options(fields)
    if is_chat:
        prompts: Prompts = [_messages(fields.take("messages"))]
        tools, variables = _of_chat(fields, given)
    else:
        prompts, tools, variables = _prompts("prompt", fields.take("prompt")), None, {}
        _of_completions(fields, given)
    values = {option: value for option, (_, value) in given.items()}
    options = _checked({"temperature": ("temperature", DEFAULT_TEMPERATURE), **given})
    fields.end()
    if len(prompts) * options.best_of > MOST_TEXTS:
        raise FieldError(
            "prompt",
            f"{len(prompts)} prompts with n or best_of {options.best_of} are more than the maximum "
            f"of {MOST_TEXTS} texts",
        )
    return TextAsked(
        model, prompts, options, is_chat, stream, with_usage, tools, variables, timeout, values
    )


def _options(fields: _Fields) -> dict[str, tuple[str, object]]:
    """Return the fields that give each option, by its name, with their values."""
    given: dict[str, tuple[str, object]] = {}

    def add(option: str, name: str, value: object) -> None:
        if value is None:
            return
        if option in given:
            raise FieldError(name, f"only one of {given[option][0]} and {name} may be given")
        given[option] = name, value

    for name in _ALIKE:
        add(name, name, fields.take(name))
    for name, option in (_NAMED | _GUIDED).items():
        add(option, name, fields.take(name))
    add("temperature", "temperature", fields.take("temperature"))
    # Clients of other servers send -1 for none.
    top_k, seed = fields.whole("top_k"), fields.whole("seed")
    add("top_k", "top_k", 0 if top_k == -1 else top_k)
    add("seed", "seed", None if seed in (None, -1) else int(seed or 0) % 2**64)
    add("max_tokens", "max_tokens", fields.take("max_tokens"))
    # JSON keys are strings.
    biases = fields.mapping("logit_bias")
    if biases:
        add("logit_bias", "logit_bias", {_token(name): bias for name, bias in biases.items()})
    form = fields.inner("response_format")
    if form is not None:
        add("json_schema", "response_format", _schema_of(form))
    return given


def _token(name: str) -> int:
    if not name.isascii() or not name.isdecimal() or len(name) > 10:
        raise FieldError("logit_bias", f"logit_bias has {name!r:.40}, which is not a token id")
    return int(name)


def _schema_of(form: _Fields) -> object:
    """Return the schema that ``response_format`` names, or None for any text."""
    kind = form.text("type")
    schema: object = None
    if kind == "json_object":
        schema = {"type": "object"}  # with any members
    elif kind == "json_schema":
        about = form.inner("json_schema")
        schema = None if about is None else about.take("schema")
        if about is None or not isinstance(schema, Mapping):
            place = "response_format.json_schema.schema"
            raise FieldError(place, f"{place} is required, an object")
        for name in ("name", "description"):
            about.text(name)
        about.flag("strict")
        about.end()
    elif kind != "text":
        raise form.wrong("type", kind, "text, json_object or json_schema")
    form.end()
    return schema


def _of_chat(
    fields: _Fields, given: dict[str, tuple[str, object]]
) -> tuple[Sequence[Mapping[str, object]] | None, Mapping[str, object]]:
    """Return the tools and the variables for the template of a chat."""
    most = fields.take("max_completion_tokens")
    if most is not None:  # the older name may be given as well
        given["max_tokens"] = "max_completion_tokens", most
    top, wanted = fields.whole("top_logprobs"), fields.flag("logprobs")
    if top is not None and not wanted:
        raise FieldError("top_logprobs", "top_logprobs requires logprobs=true")
    if wanted:
        given["logprobs"] = "top_logprobs", _logprobs("top_logprobs", top or 0)
    tools = fields.take("tools")
    known = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not known:
        raise fields.wrong("tools", tools, "a list of objects")
    choice = fields.take("tool_choice")
    # Answers are not searched for calls, so that none can be required.
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", choice, "auto or none")
    variables = dict(fields.mapping("chat_template_kwargs"))
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    fields.refuse("modalities", "only text output is supported", ["text"])
    return (tools if isinstance(tools, list) and choice != "none" else None), variables


def _of_completions(fields: _Fields, given: dict[str, tuple[str, object]]) -> None:
    logprobs, best_of = fields.whole("logprobs"), fields.take("best_of")
    if logprobs is not None:
        given["logprobs"] = "logprobs", _logprobs("logprobs", logprobs)
    if best_of is not None:
        _, count = given.get("count", ("n", 1))
        if best_of == 1 != count:  # the default of the option, which means n
            raise FieldError("best_of", f"best_of=1 is less than n={count}")
        given["best_of"] = "best_of", best_of
    given.setdefault("max_tokens", ("max_tokens", _COMPLETION_TOKENS))
    fields.refuse("echo", "echo is not supported", False)
    fields.refuse("suffix", "insertion is not supported", "")


def _logprobs(name: str, count: int) -> int:
    if not 0 <= count <= _MOST_LOGPROBS:
        raise FieldError(name, f"{name}={count}: it must be a number from 0 to {_MOST_LOGPROBS}")
    return count


def _checked(given: Mapping[str, tuple[str, object]]) -> GenerationOptions:
    try:
        return GenerationOptions(**{option: value for option, (_, value) in given.items()})  # type: ignore[arg-type]
    except (TypeError, InvalidInput) as error:
        # Messages of options begin with the name of the one that is wrong.
        message = str(error)
        option = next((option for option in given if re.match(rf"{option}\b", message)), None)
        if option is None:
            raise FieldError(None, message) from error
        name = given[option][0]
        # In the terms of the request.
        for other, (field_name, _) in given.items():
            message = re.sub(rf"\b{other}(?==)", field_name, message)
        raise FieldError(name, message) from error


def _messages(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value:
        raise FieldError("messages", "messages is required, a list of at least one message")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise FieldError(f"messages[{i}]", f"messages[{i}] must be an object")
    return value


def _prompts(name: str, value: object) -> list[str | list[int]]:
    """Return the prompts, each a string or a list of tokens, given one or several."""
    if isinstance(value, str):
        return [value]
    prompts = value if isinstance(value, list) else []
    # One prompt of tokens, and not several.
    if prompts and all(map(_is_token, prompts)):
        return [prompts]
    for prompt in prompts:
        is_tokens = isinstance(prompt, list) and bool(prompt) and all(map(_is_token, prompt))
        if not is_tokens and not isinstance(prompt, str):
            prompts = []
            break
    if not prompts:
        raise FieldError(
            name, f"{name} is required: a string, a list of tokens, or a list of these"
        )
    if len(prompts) > MOST_TEXTS:
        raise FieldError(
            name, f"{name} has {len(prompts)} texts, more than the maximum of {MOST_TEXTS}"
        )
    return prompts


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_tokens(name: str, tokens: Sequence[int], count: int) -> None:
    """Raise ``FieldError`` if a token of a field is not below the tokenizer's ``count``."""
    largest = max(tokens, default=0)
    if largest >= count:
        raise FieldError(
            name,
            f"{name} has token {largest}, but tokens must be below {count}, the vocabulary size",
        )


def decode_embeddings_request(document: object) -> EmbeddingsAsked:
    """Read the body of a request for embeddings. Raises ``InvalidInput``."""
    fields = _Fields(document)
    model, timeout = fields.text("model"), fields.seconds("timeout")
    texts = _prompts("input", fields.take("input"))
    form, dimensions = fields.text("encoding_format") or "float", fields.whole("dimensions")
    if form not in ("float", "base64"):
        raise fields.wrong("encoding_format", form, "float or base64")
    fields.take("user")
    fields.end()
    return EmbeddingsAsked(model, texts, form == "base64", dimensions, timeout)
