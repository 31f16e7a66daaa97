"""Options of compiling on the command line: the same on every command that compiles, and files that
commands write, which are tried before anything is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import click

from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.cli.base import EXECUTOR, PLANNER, CompileArguments, Decorator, compile_option
from penstock.compiler.options import (
    DEFAULT_EXPERT,
    EXECUTORS,
    EXPERT,
    PRECISIONS,
    DeadRows,
    ExpertOptions,
)
from penstock.core.limits import Limits
from penstock.core.records import fields
from penstock.peers.engines import PEERS


def _backends(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> list[str] | None:
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def _limits(
    context: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> Limits | None:
    names = [limit.name for limit in fields(Limits)]
    values: dict[str, Any] = {}
    for name, text in pairs(texts).items():
        if name not in names:
            raise click.BadParameter(f"there is no limit {name!r}; there are {', '.join(names)}")
        try:
            values[name] = None if text == "none" else float(text) if "." in text else int(text)
        except ValueError:
            raise click.BadParameter(f"{name}={text}: a number or none is needed") from None
    try:
        return Limits(**values) if values else None
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error)) from error


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """The names before the last equals sign of each text, and the values behind it."""
    pairs = {}
    for text in texts:
        # Names of nodes may have equals signs, values have none.
        name, equals, value = text.rpartition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} must be NAME=VALUE")
        pairs[name] = value
    return pairs


def _devices(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.isdigit() else [name.strip() for name in text.split(",")]


def _import_modules(context: click.Context, parameter: click.Parameter, names: Any) -> None:
    if names and "" not in sys.path:
        sys.path.insert(0, "")  # as ``python -m`` has it
    context.meta[_MODULES_KEY] = tuple(names)
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise click.BadParameter(f"cannot import {name!r}: {error}") from error


_MODULES_KEY = "penstock.modules"


def imported_modules() -> tuple[str, ...]:
    """The modules that the command line says to import first, for other processes."""
    modules: tuple[str, ...] = click.get_current_context().meta.get(_MODULES_KEY, ())
    return modules


IMPORT = click.option(
    "--import",
    multiple=True,
    metavar="MODULE",
    expose_value=False,
    is_eager=True,
    callback=_import_modules,
    help="Module to import first, for operations of your own; may be repeated.",
)

MAX_STREAMS = compile_option("max_streams", type=click.IntRange(min=1))
_OPTIONS: Mapping[str, Decorator] = {
    "executor": EXECUTOR,
    "memory_planner": PLANNER,
    "threads": compile_option("threads", type=click.IntRange(min=1)),
    "backends": compile_option(
        "backends",
        metavar="NAME,NAME",
        callback=_backends,
        help="Backends by name, the preferred first; by default native (compiled kernels), if "
        "available, and numpy. If several can run a node, costs decide.",
    ),
    "precision": compile_option("precision", type=click.Choice(PRECISIONS)),
    "dead_rows": compile_option("dead_rows", type=click.Choice(get_args(DeadRows))),
    "memory": compile_option("memory", metavar="BYTES"),
    # As of `autotune`, a flag that is not given must not override what a model's file says.
    "reproducible": compile_option("reproducible", is_flag=True, default=None),
    "place": compile_option(
        "place",
        multiple=True,
        metavar="WHAT=BACKEND",
        callback=lambda context, parameter, texts: pairs(texts) or None,
        help="The backend of an operation, as in --place Conv=numpy, or of a node, as in --place "
        "node:add_3=numpy; overrides costs. May be repeated.",
    ),
    "limits": compile_option(
        "limits",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_limits,
        help="A bound on the resources of the model, as in --limits max_bytes=1000000000, or none; "
        f"of {', '.join(limit.name for limit in fields(Limits))}. May be repeated.",
    ),
    "devices": compile_option(
        "devices",
        metavar="N or NAMES",
        callback=_devices,
        help="Virtual devices of this process, by number or by names apart by commas: the frames "
        "executor runs each node on the device that it names. By default all nodes run on one. "
        "CUDA devices, as in --devices cuda:0,cuda:1, have a backend each, called torch, torch:1 "
        "and so on in --place, with any executor.",
    ),
    "max_streams": MAX_STREAMS,
    # A flag that is not given must not override what a model's file or the environment says.
    "autotune": compile_option("autotune", is_flag=True, default=None),
    "timeout": compile_option("timeout", type=click.FloatRange(min=0)),
}


def changed(options: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, Any]:
    """Options for ``penstock.compile`` with others in their places, of these the expert options
    by their own names."""
    result = {**options, **{name: x for name, x in changes.items() if name not in EXPERT}}
    if expert := {name: x for name, x in changes.items() if name in EXPERT}:
        own = options.get("expert", DEFAULT_EXPERT)
        assert isinstance(own, ExpertOptions)
        result["expert"] = own.changed(**expert)
    return result


def gathered(name: str, record: Callable[..., object]) -> Decorator:
    """Let a command take, as one argument ``name``, the ``record`` whose fields are some of its
    options, or what a function makes of the options that are its parameters."""
    names = [*signature(record).parameters]

    def declare(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def call(*arguments: object, **values: object) -> object:
            own = {option: values.pop(option) for option in names}
            return function(*arguments, **{name: record(**own)}, **values)

        return call

    return declare


def compile_options(*without: str) -> Decorator:
    """Give a command the options of compiling, but for those ``without``. It takes the ones that
    the command line has as a mapping ``options``, for ``penstock.compile``."""
    names = [name for name in _OPTIONS if name not in without]

    def declare(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def with_options(*arguments: object, **values: object) -> object:
            taken = {
                name: values.pop("planner" if name == "memory_planner" else name) for name in names
            }
            given = {name: value for name, value in taken.items() if value is not None}
            return function(*arguments, options=changed({}, given), **values)

        # Help lists first what was declared last.
        declared: Any = with_options
        for name in reversed(names):
            declared = _OPTIONS[name](declared)
        return IMPORT(declared)

    return declare


def _compared_with(
    context: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        "backends": lambda text: _backends(context, parameter, text),
        "executor": lambda text: _one_of(EXECUTORS, text),
        "precision": lambda text: _one_of(PRECISIONS, text),
        "memory_planner": lambda text: _one_of(MEMORY_PLANNERS, text),
        "threads": _count,
    }
    values = {}
    for name, text in pairs(texts).items():
        key = "memory_planner" if name == "planner" else name
        values[key] = readers[_one_of(readers, key)](text)
    return values


def _one_of(names: Iterable[str], name: str) -> str:
    if name not in names:
        raise click.BadParameter(f"{name!r} is not one of {', '.join(names)}")
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"{text!r} is no number of threads")
    return int(text)


def _runtime_or_options(
    context: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> str | CompileArguments:
    """The runtime that the texts name, or the options that they give."""
    if not any(text in PEERS for text in texts):
        return _compared_with(context, parameter, texts)
    if len(texts) > 1:
        raise click.BadParameter(f"{' and '.join(texts)}: a runtime is named alone")
    return texts[0]


runtime_or_options = click.option(
    "--against",
    multiple=True,
    metavar="RUNTIME|OPTION=VALUE",
    callback=_runtime_or_options,
    help=f"How the second model runs: on another runtime, {', '.join(PEERS)}, or compiled with "
    "another option, as in --against backends=numpy; of backends, executor, precision, planner, "
    "threads. Options may be repeated.",
)
comparison_options = click.option(
    "--against",
    multiple=True,
    metavar="OPTION=VALUE",
    callback=_compared_with,
    help="Compare with the same model compiled with another option, as in --against "
    "backends=numpy; of backends, executor, precision, planner, threads. May be repeated.",
)


# Files.


def check_writable(path: Path) -> Path:
    """A path that can be written, as far as opening it shows."""
    existed = path.exists()
    try:
        # Opened to append, a file that is there stays as it is.
        with path.open("ab"):
            pass
    except OSError as error:
        raise click.BadParameter(f"cannot write {path}: {error.strerror}") from error
    # A command that fails later must not leave an empty file.
    if not existed:
        path.unlink()
    return path


def _written_folder(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """A folder, which is made if it is not there."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def file_option(*names: str, **settings: Any) -> Decorator:
    """An option for a file that the command writes: tried before it does anything else."""
    return click.option(
        *names,
        type=click.Path(path_type=Path),
        callback=lambda context, parameter, path: path and check_writable(path),
        **settings,
    )


def folder_option(*names: str, **settings: Any) -> Decorator:
    """As ``file_option``, for a folder."""
    return click.option(
        *names, type=click.Path(path_type=Path), callback=_written_folder, **settings
    )
