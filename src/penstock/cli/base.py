"""Shared parts of the commands: errors, ``--json``, tables, options."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import click

from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.cli.commands import main
from penstock.compiler.options import EXECUTORS, EXPERT, CompileOptions, ExpertOptions
from penstock.core.checkpoints import Progress, reporting
from penstock.core.errors import OptionError, PenstockError
from penstock.core.option_records import help_of
from penstock.core.types import JsonObject
from penstock.frontends.load import load
from penstock.host.progress_line import ProgressLine
from penstock.ir.graph import Model

Show = Callable[[JsonObject], None]
Command: TypeAlias = Callable[..., JsonObject]
"""the function of a command, which returns what ``--json`` prints"""
Decorator = Callable[[Any], Any]
CompileArguments: TypeAlias = Mapping[str, Any]
"""options of ``penstock.compile``, by name"""


class ExpertOption(click.Option):
    """An option for developers and benchmarks: help lists it below the others."""


class _Command(click.Command):
    """A command whose help has the options for experts apart."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], "Expert options": []}
        for parameter in self.get_params(context):
            title = "Expert options" if isinstance(parameter, ExpertOption) else "Options"
            row = parameter.get_help_record(context)
            rows[title] += [] if row is None else [row]
        for title, own in rows.items():
            if own:
                with formatter.section(title):
                    formatter.write_dl(own)


def command(show: Show, *, progress: bool = True) -> Callable[[Command], click.Command]:
    """Register a command: it returns what ``--json`` prints, or else ``show`` shows. A
    ``PenstockError`` or a file that cannot be written ends it with exit code 1, and so does a
    result that is not ``ok``; options that no session can have with 2. With ``progress`` a
    terminal shows how far it has come."""

    def register(function: Command) -> click.Command:
        @main.command(function.__name__, cls=_Command)
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
        @wraps(function)
        def wrapped(*arguments: Any, as_json: bool, **options: Any) -> None:
            try:
                quiet = as_json or not progress
                with showing_progress(function.__name__, quiet=quiet), warnings.catch_warnings():
                    # Python's own form shows a line of Penstock's source, which tells users
                    # nothing.
                    warnings.showwarning = _show_warning
                    result = function(*arguments, **options)
            except OptionError as error:
                raise click.UsageError(str(error)) from error
            except (PenstockError, OSError) as error:
                title = type(error).__name__
                result = {"ok": False, "error": {"type": title, "message": str(error)}}
                if not as_json:
                    click.secho(f"{title}: ", fg="red", bold=True, nl=False, err=True)
                    click.echo(str(error), err=True)
            else:
                if not as_json:
                    show(result)
            if as_json:
                import json

                click.echo(json.dumps(result, indent=2))
            if not result.get("ok", True):
                sys.exit(1)

        return wrapped

    return register


def _show_warning(message: Warning | str, *place: object, **more: object) -> None:
    click.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    click.echo(str(message), err=True)


MODEL = click.argument("model", type=click.Path())


def compile_option(name: str, **settings: Any) -> Decorator:
    """The option of the command line for one of ``CompileOptions`` or of ``ExpertOptions``. Its
    help is that of the field, unless ``settings`` have one: that of a field may speak of Python."""
    flag = "--" + name.replace("_", "-")
    record, cls = (
        (ExpertOptions, ExpertOption) if name in EXPERT else (CompileOptions, click.Option)
    )
    return click.option(flag, name, cls=cls, **{"help": help_of(record, name), **settings})


SIGNATURE = compile_option("signature", metavar="NAME")
EXECUTOR = compile_option("executor", type=click.Choice(EXECUTORS), show_default="auto")


def count_option(*names: str, least: int = 1, **settings: Any) -> Decorator:
    """An option for a whole number that is at least ``least``; its default is shown."""
    kind, has_default = click.IntRange(min=least), "default" in settings
    return click.option(*names, type=kind, show_default=has_default, **settings)


def planner_option(*more: str, note: str = "") -> Decorator:
    """The option for the memory planner, with ``more`` choices, which ``note`` explains."""
    choices = click.Choice([*MEMORY_PLANNERS, *more])
    text = help_of(ExpertOptions, "memory_planner") + note
    return click.option(
        "--planner", cls=ExpertOption, type=choices, show_default="quick", help=text
    )


PLANNER = planner_option()


def read_model(
    path: str | Path, signature: str | None, options: CompileArguments
) -> tuple[Model, dict[str, Any]]:
    """The model at a path, read within the limits and the time of the options of compiling, and
    these options with the time that is left."""
    begin, timeout = time.monotonic(), options.get("timeout")
    model = load(path, signature=signature, limits=options.get("limits"), timeout=timeout)
    left = {} if timeout is None else {"timeout": timeout - (time.monotonic() - begin)}
    return model, {**options, **left}


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], most: int | None = None
) -> None:
    """Print columns under their headers, as wide as their widest cells; of more than ``most`` rows
    the first ones, and how many more there are."""
    shown = [headers, *rows[:most]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=False)]
    for i, row in enumerate(shown):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.secho("  ".join(cells).rstrip(), bold=i == 0)
    if len(rows) >= len(shown):
        click.echo(f"and {len(rows) - len(shown) + 1} more; --json has all")


# Progress of a command on a terminal: rich's bar where rich is installed, else a line.


_DELAY = 1.0  # most commands have ended by then, for which a bar would only flicker


@contextmanager
def showing_progress(what: str, *, quiet: bool) -> Iterator[None]:
    """Show how far the work of the block has come, if it takes longer than a second."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with _shown(what) as progress, reporting(progress):
        yield


def _shown(what: str) -> AbstractContextManager[Progress]:
    try:
        import rich  # noqa: F401
    except ImportError:
        return _line(what)
    return _bar(what)


@contextmanager
def _line(what: str) -> Iterator[Progress]:
    line = ProgressLine(_DELAY)
    try:
        yield lambda step, done, total: line(f"{what}: {step}", done, total)
    finally:
        line.clear()


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    description, elapsed = TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    bar = Bar(description, BarColumn(), elapsed, console=console, transient=True)
    task = bar.add_task(what, total=None)
    timer = threading.Timer(_DELAY, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda step, done, total: bar.update(
            task, description=f"{what}: {step}", completed=done, total=total
        )
    finally:
        timer.cancel()
        # A timer that has just fired could else start the bar after it was stopped.
        timer.join()
        bar.stop()
