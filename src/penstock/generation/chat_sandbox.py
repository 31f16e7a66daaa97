"""The sandbox in which chat templates run. It imports Jinja2.

A template is a program that comes with a model and is not trusted. Jinja's sandbox denies it access
to the objects of the process. This module counts its work, since nested loops of few iterations
can take years, and a text that is joined with itself thirty times fills the memory:

- each iteration of a loop and each call is work, and so are the characters and elements that an
  operation, a method, a filter or a comparison reads (``TemplateBudget``);
- what is written, or made a text, counts with all that it has: a list may have one text or list
  many times, and lists of lists may have any number of elements in no memory;
- operations, methods and filters that may return a long text or list are checked before they run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache
from typing import NoReturn

from jinja2 import Environment, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_title
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.core.errors import InvalidInput, shortened

MOST_WORK = 128_000_000
"""units of work of a rendering: characters that are read, 8 for an element, 128 for an iteration"""
LONGEST_TEXT = 32_000_000
"""characters that a template writes, and of each text that it creates"""
MOST_ITEMS = 1_000_000
"""elements of a list that a template creates, and of all lists in it"""
LONGEST_FORM = 1000
"""characters of a form of the time"""
BUDGET = "the budget"
"""the variable with the budget of a rendering: no template can name it"""
_ITEM, _NAMED, _STEP = 8, 32, 128  # units of an element, of a filter called by its name, of a call
# Methods of strings that add spaces, and filters that create long texts or draw random numbers. No
# template of a model uses them.
_WIDENING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_UNUSED_FILTERS = (
    *("center", "format", "wordwrap", "batch", "slice", "urlize", "xmlattr", "pprint", "sum"),
    *("forceescape", "random", "filesizeformat", "striptags", "urlencode", "wordcount"),
)
# Filters that do not look into elements, and tests that do more than look at a type.
_OF_ITEMS = frozenset(
    ("list", "map", "select", "reject", "selectattr", "rejectattr", "first", "last", "reverse")
)
_OF_NONE = frozenset(("length", "count", "default", "d", "attr", "items"))
_COMPARING = frozenset(
    (
        *("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="),
        *("gt", ">", "greaterthan", "ge", ">=", "upper", "lower"),
    )
)
_WIDTH = re.compile(r"\d{5,}|\*|\{[^}]*\{")  # in a format; the last two take widths from values
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MOST_BITS, _MOST_INDENT = 10_000, 64


class TemplateBudget:
    """The remaining budget of one rendering of a template."""

    def __init__(self) -> None:
        self._work = MOST_WORK
        self._written = 0

    def work(self, units: int) -> None:
        """Count work. Raises ``InvalidInput`` when the budget is used up."""
        self._work -= units
        if self._work < 0:
            raise InvalidInput(
                f"the chat template takes too much work: more than {MOST_WORK // _STEP:,} steps, "
                f"or {MOST_WORK:,} characters that its steps read"
            )

    def step(self) -> None:
        """Count an iteration or a call."""
        self.work(_STEP)

    def write(self, length: int) -> None:
        """Count characters that are written, to the text or to a variable."""
        self._written += length
        self.check_length(self._written)
        self.work(length)

    def read(self, value: object) -> None:
        """Count the characters or elements of a value."""
        if isinstance(value, str | bytes):
            self.check_length(len(value))
            self.work(len(value))
        elif isinstance(value, Sized):
            self.work(_ITEM * len(value))

    def read_whole(self, value: object) -> None:
        """Count a value with all that is in it. Raises ``InvalidInput`` for a long one."""
        length, items, inner = 0, 0, [value]
        while inner:
            own = inner.pop()
            parts: Iterable[object] = ()
            if isinstance(own, str | bytes):
                length += len(own)
            elif isinstance(own, int):
                length += own.bit_length() // 3
            elif isinstance(own, Mapping):
                parts = (*own.keys(), *own.values())
                items += len(own)
            elif isinstance(own, list | tuple | set | frozenset):
                parts = own
                items += len(own)
            self.check_length(length)
            self.check_items(items)
            inner += parts
        self.work(length + _ITEM * items)

    @staticmethod
    def check_length(length: int) -> None:
        """Raise ``InvalidInput`` for a single text above the limit."""
        if length > LONGEST_TEXT:
            raise InvalidInput(f"the chat template makes more than {LONGEST_TEXT:,} characters")

    @staticmethod
    def check_items(count: int) -> None:
        """Raise ``InvalidInput`` for a single list above the limit."""
        if count > MOST_ITEMS:
            raise InvalidInput(f"the chat template makes lists of more than {MOST_ITEMS:,} items")


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
    elif name in ("split", "rsplit") and texts:
        TemplateBudget.check_items(text.count(texts[0]) if texts[0] else 0)
    elif name in ("split", "rsplit"):
        TemplateBudget.check_items(len(text) // 2)
    elif name == "splitlines":
        TemplateBudget.check_items(sum(map(text.count, _LINE_ENDS)))
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
        if not isinstance(left, str) and not isinstance(right, str):
            TemplateBudget.check_items(length)
    elif len(numbers) == 2:
        bits = numbers[0].bit_length() * (numbers[1] if operator == "**" else 1)
        if bits + numbers[1].bit_length() > _MOST_BITS:
            raise InvalidInput("the chat template computes with very large numbers")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MOST_INDENT or sum(map(len, separators or ())) > _MOST_INDENT:
        raise InvalidInput(f"the chat template indents JSON by more than {_MOST_INDENT} characters")
    layer: list[object] = [value] if width else []
    depth = 0
    while layer:
        inner: list[object] = []
        for own in layer:
            inner += own.values() if isinstance(own, Mapping) else ()
            inner += own if isinstance(own, list | tuple) else ()
        depth += 1
        TemplateBudget.check_length(len(inner) * width * depth)
        layer = inner
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_context
def _raise_exception(context: Context, message: object) -> NoReturn:
    _budget(context).read_whole(message)
    raise InvalidInput(f"the chat template refuses the messages: {message}")


def _written(context: Context, value: object) -> object:
    """Count a value that is written, and return it."""
    budget = _budget(context)
    if not isinstance(value, str):
        budget.read_whole(value)
        value = str(value)
    budget.write(len(value))
    return value


class GenerationBlock(Extension):
    """``{% generation %}``, which marks answers for training: its content is written."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CountingTransformer(NodeTransformer):
    """Adds counters to loops, for iterations and written text, and to what operations read; and
    checks to joined texts."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        length = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter("counted", node.iter, [nodes.Const(length, lineno=node.lineno)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter("joined", node.nodes[0], node.nodes[1:])

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        # That of a block has no value here: what the block writes counts.
        if node.node is not None and node.name not in _OF_NONE:
            node.node = _read(node.node, "items" if node.name in _OF_ITEMS else "whole")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        self.generic_visit(node)
        if node.name in _COMPARING:
            node.node = _read(node.node, "whole")
            node.args = [_read(argument, "whole") for argument in node.args]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _read(node.expr, "whole")
        for operand in node.ops:
            operand.expr = _read(operand.expr, "whole")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _read(node.node, "parts")
        return node


def _read(value: nodes.Expr, how: str) -> nodes.Expr:
    """Count what is read of a value: "whole", its "parts", or the "items" to go through."""
    if isinstance(value, nodes.Const):
        return value
    return _filter("read", value, [nodes.Const(how, lineno=value.lineno)])


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
        budget = _budget(__context)
        budget.step()
        owner = getattr(__obj, "__self__", None)
        given = [*args, *kwargs.values()]
        if not isinstance(__obj, Macro):  # whose own operations count
            for value in given:
                budget.read_whole(value)
            budget.read(owner)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), given)
        elif isinstance(owner, list | tuple) and given:  # count and index compare elements
            budget.read_whole(owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operation(operator, left, right)
        budget = _budget(context)
        if operator == "%" and isinstance(left, str):
            budget.read_whole(right)
        for value in (left, right):
            budget.read(value)
        result = super().call_binop(context, operator, left, right)
        budget.read(result)
        return result

    def call_filter(
        self,
        name: str,
        value: object,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> object:
        if context is not None:  # of map, once for each element
            _budget(context).work(_NAMED)
            _budget(context).read_whole(value)
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)

    def call_test(
        self,
        name: str,
        value: object,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> object:
        if context is not None:  # of select and its like, once for each element
            _budget(context).work(_NAMED)
            if name in _COMPARING:
                _budget(context).read_whole([value, *(args or ())])
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and isinstance(owner, str) and _WIDTH.search(owner):
            raise InvalidInput(f"the chat template has a wide format: {shortened(owner)!r}")
        return wrapped


@pass_context
def _counted(context: Context, values: Iterable[object], length: int) -> Iterator[object]:
    budget = _budget(context)
    for value in values:
        budget.step()
        budget.write(length)
        yield value


@pass_context
def _read_value(context: Context, value: object, how: str) -> object:
    budget = _budget(context)
    if how == "whole":
        budget.read_whole(value)
    else:
        budget.read(value)
    if how == "items" and isinstance(value, Sized):
        budget.check_items(len(value))
    return value


@pass_context
def _joined(context: Context, first: object, *others: object) -> str:
    _budget(context).read_whole([first, *others])
    return "".join([str(value) for value in (first, *others)])


@pass_context
def _join(
    context: Context, values: Iterable[object], d: str = "", attribute: str | None = None
) -> str:
    items = list(values)
    if attribute is not None:
        items = [item[attribute] for item in items if isinstance(item, Mapping)]
    _budget(context).read_whole(items)
    texts = [str(item) for item in items]
    TemplateBudget.check_length(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    _check_replacement(str(text), old, new)
    return str(text).replace(old, new, -1 if count is None else count)


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    length = width if isinstance(width, int) else len(width)
    TemplateBudget.check_length((str(text).count("\n") + 1) * length + len(str(text)))
    return do_indent(text, width, first, blank)


@pass_context
def _titled(context: Context, text: object) -> str:
    # Each word is a part of a list, and takes a step of Python's.
    length = len(str(text))
    TemplateBudget.check_items(length // 2)
    _budget(context).work(_ITEM * length)
    return do_title(str(text))


# Those that replace Jinja's, and those that count.
_FILTERS: Mapping[str, Callable[..., object]] = {
    "counted": _counted,
    "read": _read_value,
    "joined": _joined,
    "join": _join,
    "replace": _replace,
    "indent": _indented,
    "title": _titled,
    "tojson": _to_json,
}


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
    sandbox.filters |= _FILTERS
    sandbox.globals["raise_exception"] = _raise_exception
    for name in ("lipsum", "cycler", "joiner"):
        sandbox.globals.pop(name, None)
    return sandbox
