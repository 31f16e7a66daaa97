"""The command line: ``penstock run | compile | info | check | plan | profile | bench | cache``.

Exit code 0, 1 (the model or an input is at fault), 2 (usage). With ``--json`` every command prints
one JSON object on standard output, errors included.
"""

from __future__ import annotations

from penstock.cli.commands import main

__all__ = ["main"]
