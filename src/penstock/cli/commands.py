"""The group of the commands, each of which is imported when it is called."""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import Any

import click

from penstock.core import VERSION
from penstock.host.gc_pause import paused

COMMANDS = {
    "bench": ("bench", "Time a model, by executor and number of threads."),
    "cache": ("cache", "List or remove the sessions that compile(cache=...) keeps."),
    "chat": ("chat", "Talk with a language model in the terminal."),
    "check": ("inspect", "Verify a model and report everything that is wrong with it."),
    "compare": ("compare", "Show where values differ between two ways to compile a model."),
    "compile": ("compile", "Compile a model ahead of its first run, into a file."),
    "info": ("info", "Show what a model is made of; with --plan, its work and memory."),
    "plan": ("inspect", "Show how a model will run: its steps and their memory."),
    "profile": ("profile", "Measure every node on every backend."),
    "quantize": ("quantize", "Make a model smaller and faster within a stated error."),
    "report": ("report", "Write a page that shows where time and memory of a model go."),
    "run": ("run", "Run a model once, and show or save its outputs."),
    "serve": ("serve", "Answer requests for models over HTTP."),
}
"""The module of each command, and what it does"""


_AS_JSON = "penstock.as_json"


class _Commands(click.Group):
    """Commands that are imported when they are called: the list of them needs none."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            atexit.register(gc.freeze)  # a process that ends need not look for garbage
            with paused():  # what modules define stays
                import_module(f"penstock.cli.{COMMANDS[name][0]}")
        return super().get_command(context, name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(context)])

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[_AS_JSON] = "--json" in args
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        """With ``--json`` a wrong command line is an object as well."""
        try:
            return super().invoke(context)
        except click.UsageError as error:
            if not context.meta[_AS_JSON]:
                raise
            import json

            about = {"type": "UsageError", "message": error.format_message()}
            click.echo(json.dumps({"ok": False, "error": about}, indent=2))
            context.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="penstock")
def main() -> None:
    """Run neural networks, and look at how they run."""
