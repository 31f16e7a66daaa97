"""Records of options, whose fields are the parameters of functions.

``takes`` gives a function that passes its arguments to such a record the record's signature, for
type checkers and for ``help``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, Signature, cleandoc
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from penstock.core.records import field, fields


def option(default: Any, help: str, allowed: Callable[[Any], bool] | None = None) -> Any:
    """Return a field of a record of options. ``help`` is its text in documentation and on the
    command line; ``allowed`` checks that a value has a type that the field declares."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


P = ParamSpec("P")
First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")


@overload
def takes(
    record: Callable[P, Any],
) -> Callable[[Callable[..., Result]], Callable[Concatenate[First, P], Result]]: ...


@overload
def takes(
    record: Callable[P, Any], after: tuple[type[Second]]
) -> Callable[[Callable[..., Result]], Callable[Concatenate[First, Second, P], Result]]: ...


def takes(record: Callable[..., Any], after: tuple[type, ...] = ()) -> Callable[..., Any]:
    """Declare that a function takes the parameters of ``record`` after its first parameter and one
    more for each type in ``after``.

    The function itself is returned, with the signature and the documentation of the options.
    """

    def declare(function: Any) -> Any:
        leading = function.__code__.co_varnames[: 1 + len(after)]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in leading]
        function.__signature__ = Signature([*parameters, *_parameters(record)])
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{document(record)}"
        return function

    return declare


@cache
def _parameters(record: Any) -> list[Parameter]:
    """Return the parameters of a record."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return [
        Parameter(f.name, kinds[f.kw_only is True], default=f.default, annotation=f.type)
        for f in fields(record)
    ]


@cache
def document(record: Any) -> str:
    """Return the options of ``record`` and their texts, one paragraph each."""
    return "\n\n".join(f"``{f.name}``: {f.metadata['help']}" for f in fields(record))


def help_of(record: Any, name: str) -> str:
    """Return the text of one option."""
    return next(str(f.metadata["help"]) for f in fields(record) if f.name == name)


@cache
def option_names(record: Any) -> Sequence[str]:
    """Return the names of the options of a record."""
    return [f.name for f in fields(record)]
