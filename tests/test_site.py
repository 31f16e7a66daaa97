"""The site of the documentation: it builds strictly, and has each public name once."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock import Observer
from penstock.cli.commands import COMMANDS

pytestmark = pytest.mark.costly(share=1)

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parent.parent
NAMES = {  # of modules that do not list their public names
    "penstock.compat": ["install"],
    "penstock.compat.ai_edge_litert.interpreter": [
        "Delegate",
        "Interpreter",
        "OpResolverType",
        "SignatureRunner",
        "load_delegate",
    ],
}
LISTED = [
    *("penstock", "penstock.extend", "penstock.testing", "penstock.build", "penstock.generation"),
    "penstock.compat.onnxruntime",
]


def public_names() -> Iterator[str]:
    for module in LISTED:
        yield from (f"{module}.{name}" for name in import_module(module).__all__)
    for module, names in NAMES.items():
        yield from (f"{module}.{name}" for name in names)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_every_public_name_on_one_page(site):
    pages = [path.read_text() for path in site.glob("reference/*.html")]
    found = Counter(
        name for text in pages for name in re.findall(r'<h\d id="(penstock[\w.]+)"', text)
    )
    wrong = {name: found[name] for name in public_names() if found[name] != 1}
    assert not wrong, "how often each is in the reference"


def test_site_lists_the_options_of_compile(site):
    page = (site / "reference/compiling.html").read_text()
    for name in ("executor", "max_pending", "expert"):
        assert re.search(rf"<td>\s*<code>{name}</code>", page)


def test_site_lists_the_arguments_of_asynchronous_methods(site):
    page = (site / "reference/generation.html").read_text()
    for method in ("stream", "agenerate", "astream"):
        _, _, text = page.partition(f'id="penstock.generation.Generator.{method}"')
        section = re.split(r'<h\d id="penstock', text)[0]
        for name in ("prompt", "cancel", "tools"):
            assert re.search(rf"<td>\s*<code>{name}</code>", section), (method, name)


def test_site_shows_the_help_of_each_command(site):
    page = (site / "reference/command-line.html").read_text()
    assert len(COMMANDS) > 5
    for name in COMMANDS:
        assert f"Usage: penstock {name}" in page


def test_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(\w+:[^"]*)', page.read_text()
        )
        assert not [address for address in loaded if not address.startswith("data:")], page


def described(owner: Any, parameter: str) -> bool:
    """Whether the documentation of a function or class has the parameter in a list."""
    return re.search(rf"(?m)^\s*(?:``)?{parameter}(?:``)?: ", owner.__doc__ or "") is not None


def callables() -> Iterator[tuple[str, Any, Any]]:
    """What users call: its name, what documents its parameters, and what has them."""
    from tools.site import SAME_ARGUMENTS  # needs mkdocs

    for name in public_names():
        module, _, last = name.rpartition(".")
        thing = getattr(import_module(module), last)
        if not inspect.isclass(thing):
            if inspect.isfunction(thing):  # no type, and no value
                yield name, thing, thing
        elif not issubclass(thing, Exception) and not is_dataclass(thing):
            called = not issubclass(thing, Enum) and not getattr(thing, "_is_protocol", False)
            made = last in ("Session", "StepSequence")  # by functions of Penstock's
            if called and not made and thing.__init__ is not object.__init__:
                yield name, thing, thing.__init__
            for method, function in vars(thing).items():
                shown = not method.startswith("_") and method not in HIDDEN
                if inspect.isfunction(function) and shown:
                    owner = function
                    while same := SAME_ARGUMENTS.search(owner.__doc__ or ""):
                        owner = vars(thing)[same[1]]
                    yield f"{name}.{method}", owner, function


HIDDEN = {
    *("job", "watched", "forked", "attach", "detach", "replay", "thread_name"),
    *("executor", "undeclared_loss", "link_cost", "each_worker"),
    *("variables", "home", "variable", "set_variable"),  # what sessions ask clusters for
    *[name for name in vars(Observer) if not name.startswith("_")],  # their texts say it
}


def test_parameters_of_public_functions_are_described_in_lists():
    missing = []
    for title, owner, function in callables():
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.name not in ("self", "cls", "arguments")]
        if {"arguments", "options"} <= {p.name for p in parameters}:  # passed on, as the text says
            names.remove("options")
        missing += [f"{title}: {name}" for name in names if not described(owner, name)]
    assert missing == []
