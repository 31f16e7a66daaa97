"""Reports as one HTML page that needs nothing else: styles, programs and data stand in it.

A policy in its head forbids the page all of the network. The programs are those of
``assets``, in the order of ``_SCRIPTS``; d3 is Mike Bostock's, under the ISC licence.
"""

from __future__ import annotations

import json
import os
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from penstock.core.records import cached_property
from penstock.core.types import JsonObject

D3 = "d3-7.9.0.min.js"

_SCRIPTS = (
    *("core.js", "layout.js", "graph.js", "timeline.js", "memory.js"),
    *("table.js", "roofline.js", "compare.js", "main.js"),
)


class Report:
    """The result of ``Inspection.report``. ``document`` has the data of the page, as JSON can have
    them; notebooks show the page itself."""

    def __init__(self, document: JsonObject) -> None:
        self.document = document

    @cached_property
    def html(self) -> str:
        """The page, which needs no other file and no network."""
        return report_page(self.document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file. Raises ``OSError`` where that cannot be written."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        frame = 'style="width:100%;height:640px;border:0" sandbox="allow-scripts"'
        return f'<iframe {frame} srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        steps = len(self.document["steps"].get("name", ()))
        return f"Report({self.document['title']!r}, {steps} steps, {self.document['runs']} runs)"


def report_page(document: JsonObject) -> str:
    """The page for the data of a report."""
    # The parser of HTML looks for the end of the script in the data.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(str(document["title"])),
        "STYLE": asset("report.css"),
        "LICENCE": asset("d3.LICENSE").replace("--", "- -"),
        "D3": asset(D3),
        "PROGRAM": "\n".join(map(asset, _SCRIPTS)),
        "DATA": data,
    }
    pieces = asset("report.html").split("@@")
    return "".join(parts.get(piece, piece) if i % 2 else piece for i, piece in enumerate(pieces))


@cache
def asset(name: str) -> str:
    """The text of a file of the package."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
