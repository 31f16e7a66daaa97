"""The page at ``/``: what the server has, and how to ask it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import quote

from penstock.core import VERSION
from penstock.core.types import JsonObject
from penstock.serving.openapi import example_request
from penstock.serving.repository import ServedModel

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""what browsers may load for the page (Content-Security-Policy)"""

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
td, th { text-align: left; padding: 0.2rem 1.5rem 0.2rem 0; }
pre { overflow-x: auto; padding: 1rem; border: 1px solid; }
""".strip()
_LINKS = ("/v2", "/v2/models", "/v2/health/ready", "/metrics", "/openapi.json")


def page(models: Iterable[ServedModel], base_url: str) -> str:
    """The page for models, in HTML; ``base_url``: by which the client reached the server."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>Penstock</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>",
        f"<h1>Penstock {escape(VERSION)}</h1>",
        "<p>This server speaks the Open Inference Protocol, version 2.</p>",
        f"<p>{' '.join(_link(path) for path in _LINKS)}</p>",
        *[_model(model, base_url) for model in models],
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _model(model: ServedModel, base_url: str) -> str:
    path = f"/v2/models/{quote(model.name, safe='')}/versions/{model.version}"
    example = example_request(model).curl(base_url, model.name)
    return "\n".join(
        [
            f"<h2>{escape(model.name)}, version {escape(model.version)}</h2>",
            f"<p>{' '.join(_link(path + end) for end in ('', '/config', '/stats'))}</p>",
            _table("Inputs", model.inputs),
            _table("Outputs", model.outputs),
            f"<p>An example, of zeros:</p>\n<pre>{escape(example)}</pre>",
        ]
    )


def _table(title: str, ports: Sequence[JsonObject]) -> str:
    rows = [(port["name"], port["datatype"], str(port["shape"])) for port in ports]
    lines = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    head = f"<tr><th>{title}</th><th>Datatype</th><th>Shape</th></tr>"
    return f"<table>\n{head}\n{lines}\n</table>"


# From the root of whatever host the page came by, which may be a proxy.
def _link(path: str) -> str:
    return f'<a href="{escape(path)}">{escape(path)}</a>'
