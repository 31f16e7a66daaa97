"""The sandbox in which chat templates run. It imports Jinja2.

A template is a program that comes with a model and is not trusted. Jinja's sandbox denies it access
to the objects of the process. This module counts its work, since nested loops of few iterations
can take years, and a text that is joined with itself thirty times fills the memory:

- each iteration of a loop and each call is a step (``TemplateBudget``);
- written characters count, whether written to the text, to a variable, or by a loop;
- operations, methods and filters that may return a long text or list are checked before they run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NoReturn

from jinja2 import Environment, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.core.errors import InvalidInput, shortened

MOST_STEPS = 1_000_000
"""iterations and calls of a template"""
LONGEST_TEXT = 64_000_000
"""characters that a template writes, and of each text that it creates"""
MOST_ITEMS = 1_000_000
"""elements of a list that a template creates"""
BUDGET = "the budget"
"""the variable with the budget of a rendering: no template can name it"""
# Methods of strings that add spaces, and filters that create long texts or draw random numbers. No
# template of a model uses them.
_WIDENING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_UNUSED_FILTERS = (
    *("center", "format", "wordwrap", "batch", "slice", "urlize", "xmlattr", "pprint", "sum"),
    *("forceescape", "random", "filesizeformat"),
)
_WIDTH = re.compile(r"\d{5,}|\*|\{[^}]*\{")  # in a format; the last two take widths from values
_MOST_BITS = 10_000


class TemplateBudget:
    """The remaining budget of one rendering of a template."""

    def __init__(self) -> None:
        self._steps = MOST_STEPS
        self._characters = LONGEST_TEXT

    def step(self) -> None:
        """Count an iteration or a call."""
        self._steps -= 1
        if self._steps < 0:
            raise InvalidInput(f"the chat template takes more than {MOST_STEPS:,} steps")

    def write(self, length: int) -> None:
        """Count characters that are written, to the text or to a variable."""
        self._characters -= length
        self.check_length(LONGEST_TEXT - self._characters)

    @staticmethod
    def check_length(length: int) -> None:
        """Raise ``InvalidInput`` for a single text or list above the limit."""
        if length > LONGEST_TEXT:
            raise InvalidInput(f"the chat template makes more than {LONGEST_TEXT:,} characters")


def _budget(context: Context) -> TemplateBudget:
    budget = context.resolve_or_missing(BUDGET)
    if not isinstance(budget, TemplateBudget):
        raise InvalidInput("the chat template runs without a budget")
    return budget


def _check_method(text: str, name: str, arguments: Sequence[object]) -> None:
    """Refuse a method of ``text`` whose result may be very long."""
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "replace" and len(texts) == 2:
        _check_replacement(text, *texts)
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        lengths = [len(part) for part in arguments[0] if isinstance(part, str)]
        TemplateBudget.check_length(sum(lengths) + len(text) * len(lengths))
    elif name == "translate":
        raise InvalidInput("the chat template calls translate, which makes texts of any length")
    elif name in _WIDENING:
        widths = [abs(value) for value in arguments if isinstance(value, int)]
        TemplateBudget.check_length(len(text) + (text.count("\t") + 1) * max(widths, default=0))


def _check_replacement(text: str, old: str, new: str) -> None:
    TemplateBudget.check_length(len(text) + text.count(old) * len(new))


def _check_operation(operator: str, left: object, right: object) -> None:
    """Refuse an operation whose result may be very large."""
    sized = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    numbers = [abs(value) for value in (left, right) if isinstance(value, int)]
    if operator == "%" and isinstance(left, str):
        if _WIDTH.search(left):
            raise InvalidInput(f"the chat template has a wide format: {shortened(left)!r}")
    elif sized and operator in ("+", "*"):
        length = sum(sized) if operator == "+" else sized[0] * max(numbers, default=0)
        TemplateBudget.check_length(length)
        if length > MOST_ITEMS and not isinstance(left, str) and not isinstance(right, str):
            raise InvalidInput(f"the chat template makes lists of more than {MOST_ITEMS:,} items")
    elif len(numbers) == 2:
        bits = numbers[0].bit_length() * (numbers[1] if operator == "**" else 1)
        if bits + numbers[1].bit_length() > _MOST_BITS:
            raise InvalidInput("the chat template computes with very large numbers")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise InvalidInput(f"the chat template refuses the messages: {message}")


def _written(context: Context, value: object) -> object:
    """Count a value that is written, and return it."""
    text = value if isinstance(value, str) else str(value)
    _budget(context).write(len(text))
    return text


class GenerationBlock(Extension):
    """``{% generation %}``, which marks answers for training: its content is written."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CountingTransformer(NodeTransformer):
    """Adds counters to loops, for iterations and written text, and checks to joined texts."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        length = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter("counted", node.iter, [nodes.Const(length, lineno=node.lineno)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter("joined", node.nodes[0], node.nodes[1:])


def _filter(name: str, value: nodes.Node, arguments: list[nodes.Expr]) -> nodes.Filter:
    line = value.lineno
    return nodes.Filter(value, name, arguments, [], None, None, lineno=line)


class CountingSandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with steps and lengths counted."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        CountingTransformer().visit(template)
        template.set_environment(self)
        return template

    def call(
        __self,  # noqa: N805 - as in the base class
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        _budget(__context).step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and isinstance(owner, str) and _WIDTH.search(owner):
            raise InvalidInput(f"the chat template has a wide format: {shortened(owner)!r}")
        return wrapped


@cache
def chat_environment() -> Environment:
    """Return Jinja's sandbox with counters, and with what Hugging Face's templates expect."""
    sandbox = CountingSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # otherwise constant parts would be computed uncounted at compile time
        finalize=pass_context(_written),
        extensions=[loopcontrols, GenerationBlock],
    )
    for name in _UNUSED_FILTERS:
        sandbox.filters.pop(name, None)
    sandbox.filters |= _filters(sandbox.filters["indent"])
    sandbox.globals["raise_exception"] = _raise_exception
    for name in ("lipsum", "cycler", "joiner"):
        sandbox.globals.pop(name, None)
    return sandbox


def _filters(indent: Callable[..., str]) -> dict[str, Callable[..., object]]:
    """Return the filters that replace Jinja's, and those that count."""

    @pass_context
    def counted(context: Context, values: Iterable[object], length: int) -> Iterator[object]:
        budget = _budget(context)
        for value in values:
            budget.step()
            budget.write(length)
            yield value

    def joined(first: object, *others: object) -> str:
        texts = [str(value) for value in (first, *others)]
        TemplateBudget.check_length(sum(map(len, texts)))
        return "".join(texts)

    def join(values: Iterable[object], d: str = "", attribute: str | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [item[attribute] for item in items if isinstance(item, Mapping)]
        texts = [str(item) for item in items]
        TemplateBudget.check_length(sum(map(len, texts)) + len(str(d)) * len(texts))
        return str(d).join(texts)

    def replace(text: object, old: str, new: str, count: int | None = None) -> str:
        _check_replacement(str(text), old, new)
        return str(text).replace(old, new, -1 if count is None else count)

    def indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        length = width if isinstance(width, int) else len(width)
        TemplateBudget.check_length((str(text).count("\n") + 1) * length + len(str(text)))
        return indent(text, width, first, blank)

    return {
        "counted": counted,
        "joined": joined,
        "join": join,
        "replace": replace,
        "indent": indented,
        "tojson": _to_json,
    }
