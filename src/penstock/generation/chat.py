"""Texts that chat templates render from messages, as Hugging Face's tokenizers do.

A template is a Jinja program that comes with a model; ``chat_sandbox`` limits what it may
do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidInput, InvalidModel, extra_needed, shortened

if TYPE_CHECKING:
    from penstock.generation.tokenizer import TextTokenizer

LONGEST_TEMPLATE = 1_000_000


class ChatTemplate:
    """A compiled template. Threads may share it.

    ``variables`` are passed to every rendering, such as ``bos_token`` and ``eos_token``. Raises
    ``InvalidModel`` if it is not a Jinja template.
    """

    def __init__(self, text: str, **variables: str) -> None:
        with extra_needed("a chat template needs Jinja2", "generate"):
            from jinja2 import TemplateSyntaxError

            from penstock.generation.chat_sandbox import chat_environment
        if len(text) > LONGEST_TEMPLATE:
            raise InvalidModel(f"the chat template has more than {LONGEST_TEMPLATE:,} characters")
        self._variables = variables
        try:
            self._template = chat_environment().from_string(text)
        except TemplateSyntaxError as error:
            raise InvalidModel(f"the chat template, line {error.lineno}: {error}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise InvalidModel(f"the chat template is nested too deeply: {error}") from error

    @classmethod
    def of(cls, tokenizer: TextTokenizer, *, tools: bool = False) -> ChatTemplate:
        """Return the template of a tokenizer; with ``tools``, its template for tools if it has one.
        Raises ``InvalidInput`` if it has none."""
        templates = tokenizer.chat_templates
        text = templates.get("tool_use") if tools else None
        text = templates.get("default") if text is None else text
        if text is None:
            raise InvalidInput(
                "the model has no chat template: give one, or a text in place of messages"
            )
        ids = {"bos_token": tokenizer.start_id, "eos_token": tokenizer.end_id}
        texts = {name: tokenizer.text_of(i) for name, i in ids.items() if i is not None}
        return cls(text, **{name: token or "" for name, token in texts.items()})

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> str:
        """Return the text of some messages, with the beginning of an answer if
        ``add_generation_prompt``. If the template writes tokens that begin a text, they are
        included: encode the text with ``add_special=False``.

        ``variables`` are passed to the template in addition, such as ``enable_thinking``; ``now``
        is the time that it uses as the current one. Raises ``InvalidInput`` for invalid messages,
        or messages that the template refuses.
        """
        from jinja2 import TemplateError

        from penstock.generation.chat_sandbox import BUDGET, LONGEST_FORM, TemplateBudget

        def strftime_now(form: str) -> str:
            if len(form) > LONGEST_FORM:
                raise InvalidInput(f"the chat template's form of the time has {len(form)} letters")
            return (now or datetime.now()).strftime(form)

        names = {
            "bos_token": "",
            "eos_token": "",
            "documents": None,
            **self._variables,
            **(variables or {}),
            "messages": checked_messages(messages),
            "tools": [*tools] if tools else None,
            "add_generation_prompt": bool(add_generation_prompt),
            "strftime_now": strftime_now,
            BUDGET: TemplateBudget(),
        }
        try:
            return self._template.render(names)
        except InvalidInput:
            raise
        except TemplateError as error:
            raise InvalidInput(f"the chat template: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise InvalidInput(f"the chat template takes too much memory: {error}") from error
        except Exception as error:  # of the template's program, and of Jinja for its arguments
            message = f"{type(error).__name__}: {error}"
            raise InvalidInput(f"the chat template cannot be run: {message}") from error


def checked_messages(messages: object) -> list[dict[str, object]]:
    """Return messages as templates expect them: the parts of a content joined by lines, and the
    arguments of tool calls as objects. Raises ``InvalidInput``, which names the wrong message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidInput(f"messages are no sequence, but {shortened(repr(messages))}")
    if not messages:
        raise InvalidInput("there are no messages")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(place: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidInput(f"{place} is no mapping of role and content: {shortened(repr(message))}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInput(f"{place} has the role {shortened(repr(role))}: a text is needed")
    checked = {str(name): value for name, value in message.items()}
    content = checked.get("content")
    calls = checked.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        parts = [_text_of_part(f"{place}.content[{i}]", part) for i, part in enumerate(content)]
        checked["content"] = "\n".join(parts)
    elif content is None and calls:
        checked["content"] = ""
    elif not isinstance(content, str):
        raise InvalidInput(
            f"{place} has the content {shortened(repr(content))}: a text, or parts of the type "
            "text, are needed"
        )
    if calls is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise InvalidInput(f"{place}.tool_calls is no sequence: {shortened(repr(calls))}")
        checked["tool_calls"] = [_call_with_object(call) for call in calls]
    return checked


def _text_of_part(place: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InvalidInput(f"{place} is no part of the type text: {shortened(repr(part))}")
    return text


def _call_with_object(call: object) -> object:
    """Return a tool call with its arguments as an object if they are the JSON text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if (
        not isinstance(text, str)
        or not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
    ):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
