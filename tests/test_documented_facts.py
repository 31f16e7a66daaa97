"""Numbers, names and tables of the documents' prose are those of the code.

What the documents say a program prints is in ``test_readme``; here is what their sentences and
tables say. A sentence that is rewritten is rewritten here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import observers
from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.backends.registry import BACKENDS
from penstock.compiler.options import DEFAULTS, EXECUTORS, PRECISIONS
from penstock.core import errors
from penstock.core.limits import FREE_NODES
from penstock.core.records import fields

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def prose(page: str) -> str:
    """A page on one line."""
    return re.sub(r"\s+", " ", (DOCS / page).read_text())


def constant(path: str) -> Any:
    """A constant by its module, under ``penstock``, and its name."""
    module, name = re.split(r"\.(?=_?[A-Z])", path, maxsplit=1)
    return attrgetter(name)(import_module(f"penstock.{module}"))


K, M, G = 1 << 10, 1 << 20, 1 << 30
NUMBERS = [  # page, sentence with the number, its unit, and the constant
    ("guarantees.md", r"Runs under (\d+) ms", 1e-3, "core.checkpoints.SHORT_RUN_S"),
    ("guarantees.md", r"about twice what sharing", 2, "host.admission._SLACK"),
    ("guarantees.md", r"grown by the same step three times", 3, "compiler.varying_shapes.GROWN"),
    ("guarantees.md", r"until one has had eight runs", 8, "compiler.varying_shapes.OFTEN"),
    ("guarantees.md", r"at most (\d+) MiB in the process", M, "host.malloc.MOST_KEPT"),
    ("guarantees.md", r"arrays of more than (\d+) KiB", K, "artifact.container._LARGE"),
    ("guarantees.md", r"a node keeps (\d+) of them", 1, "backends.dynamic_shapes._MOST_KERNELS"),
    ("guarantees.md", r"a session (\d+) MiB for each", M, "backends.specializing._MOST_BYTES"),
    ("guarantees.md", r"each of the first (\d+) faults", 1, "core.errors.MAX_PROBLEMS"),
    ("guarantees.md", r"the text lists the first (\d+)", 1, "core.errors.MAX_PROBLEMS"),
    ("guarantees.md", r"the verifier stop at ([\d,]+) faults", 1, "core.errors.MOST_COUNTED"),
    ("guarantees.md", r"at least every (\d+) nodes", 1, "core.checkpoints.CHECK_EVERY"),
    ("guarantees.md", r"each (\d+) statements", 1, "core.checkpoints.CHECK_EVERY"),
    ("guarantees.md", r"most (\d+) times its bytes", 1, "frontends.common.weight_file.MAX_OVERLAP"),
    ("guarantees.md", r"sixteen times its bytes", 16, "frontends.tflite.flatbuffer._MAX_OVERLAP"),
    ("guarantees.md", r"([\d,]+) nodes and 16", 1, "frontends.tensorflow.saved_model._FREE_NODES"),
    ("guarantees.md", r"(\d+) times the nodes", 1, "frontends.tensorflow.saved_model._MAX_USES"),
    ("guarantees.md", r"more than (\d+) characters", 1, "core.errors.MAX_NAME"),
    ("guarantees.md", r"results of at most (\d) KiB outside", K, "ops.result_bytes.SMALL_BYTES"),
    ("guarantees.md", r"on NumPy of (\d) GFLOP", 1e9, "ops.common.products.MOST_FLOPS"),
    ("how-to/cold-start.md", r"at most (\d) GiB", G, "session.compile_cache.MOST_BYTES"),
    ("how-to/reduce-memory.md", r"at least (\d+) MiB", M, "session.plan_cache._LEAST_BYTES"),
    (
        "how-to/decoding.md",
        r"grown three times by the same amount",
        3,
        "compiler.varying_shapes.GROWN",
    ),
    ("how-to/several-shapes.md", r"same step three times", 3, "compiler.varying_shapes.GROWN"),
    (
        "guarantees.md",
        r"of (\d+) KiB or more with the same bytes",
        K,
        "core.shared_arrays.LEAST_BYTES",
    ),
    ("guarantees.md", r"A bias of -([\d,]+) or less", -1, "ops.internal.packed.LOWEST"),
    ("how-to/unequal-lengths.md", r"bias of -([\d,]+) or less", -1, "ops.internal.packed.LOWEST"),
    (
        "explanation/executors.md",
        r"takes some (\d+) us",
        1e-6,
        "host.threads.OVERHEADS.hand_over_s",
    ),
    (
        "explanation/streams.md",
        r"with (\d+) us for each wait",
        1e-6,
        "host.threads.OVERHEADS.hand_over_s",
    ),
    ("explanation/frames.md", r"take (\d+) us or more", 1e-6, "host.threads.OVERHEADS.long_s"),
    ("explanation/memory.md", r"multiples of (\d+) bytes", 1, "algorithms.arena.ALIGNMENT"),
    ("reference/environment.md", r"last ([\d,]+) begins", 1, "session.environment.TRACED"),
    ("serving.md", r"head is longer than (\d+) KiB", K, "serving.connection._HEAD"),
    ("serving.md", r"within (\d) % of the largest", 0.01, "serving.batching._TOLERANCE"),
    ("serving.md", r"three rows at once", 3, "serving.batching._ROWS"),
]


@pytest.mark.parametrize(("page", "sentence", "unit", "path"), NUMBERS, ids=[n[3] for n in NUMBERS])
def test_number_in_a_sentence_is_the_constant(page, sentence, unit, path):
    """A sentence without a group has its number in words."""
    match = re.search(sentence, prose(page))
    assert match is not None, f"{page} has no {sentence!r}"
    numeral = next(filter(None, match.groups()), "1")
    assert int(numeral.replace(",", "")) * unit == pytest.approx(constant(path))


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table under ``head``."""
    lines = (DOCS / page).read_text().split(f"\n{head}", 1)[1].splitlines()[2:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def in_words(value: float | None) -> str:
    if value is None:
        return "none"
    if value == 2**62:
        return "2^62"
    return f"{value // M} MiB" if value >= M and value % M == 0 else f"{value:,}"


def test_table_of_limits_has_all_with_their_defaults():
    table = {name.strip("`"): default for name, _, default in rows("guarantees.md", "| limit |")}
    limits = ps.Limits()
    assert set(table) == {field.name for field in fields(ps.Limits)}
    described = {
        "max_bytes": "the machine's memory, or its cgroup's",
        "max_plans_bytes": "as many as the constants have, at least 64 MiB",  # None in code
    }
    for name, default in table.items():
        assert default == described.get(name, in_words(getattr(limits, name))), name
    assert limits.max_bytes and limits.max_plans_bytes is None
    assert f"the first {FREE_NODES:,}" in prose("guarantees.md")


def error_classes() -> dict[str, type]:
    names = [n for n in ps.__all__ if isinstance(getattr(ps, n), type)]
    return {n: getattr(ps, n) for n in names if issubclass(getattr(ps, n), Exception)}


def test_table_of_errors_has_every_public_error_and_says_which_are_run_errors():
    classes = error_classes()
    assert len(classes) > 8 and errors.PenstockError is classes.pop("PenstockError")
    table = rows("guarantees.md", "| | |")
    named = {name: text for names, text in table for name in re.findall(r"`(\w+)`", names)}
    assert set(named) == set(classes)
    for name, error in classes.items():
        assert issubclass(error, ps.PenstockError)
        kind = issubclass(error, ps.RunError) and error is not ps.RunError
        assert named[name].startswith("kinds of `RunError`") == kind, name
    listed = re.findall(r"`(\w+)`", prose("reference/errors.md").partition("are kinds of")[0])
    assert set(listed) == {n for n, e in classes.items() if issubclass(e, ps.RunError)} - {
        "RunError"
    }


TABLES = [  # page, first words of the head, and the names that its first column has
    ("explanation/executors.md", "| executor |", EXECUTORS),
    ("explanation/precision.md", "| `precision=` |", PRECISIONS),
    ("explanation/memory.md", "| planner |", MEMORY_PLANNERS),
    ("explanation/backends.md", "| backend |", tuple(BACKENDS)),
]


@pytest.mark.parametrize(("page", "head", "names"), TABLES, ids=[t[0] for t in TABLES])
def test_table_of_choices_has_each_once_and_the_default(page, head, names):
    cells = [row[0] for row in rows(page, head)]
    first = [re.findall(r"`\"?([\w]+)\"?`", cell)[0] for cell in cells]
    assert sorted(first) == sorted(names)
    for option in ("executor", "precision", "memory_planner"):
        default = DEFAULTS.get(option)
        if default in names:
            (row,) = [row for row in rows(page, head) if f'"{default}"' in row[0]]
            assert "default" in " ".join(row)


def test_reference_has_a_row_for_each_page_with_the_names_on_it():
    index = {
        re.findall(r"\((.*?)\)", page)[0]: names
        for page, names in rows("reference/index.md", "| page |")
        if "(" in page
    }
    for path in sorted((DOCS / "reference").glob("*.md")):
        if path.name == "index.md":
            continue
        text = index[path.name]
        own = re.findall(r"^::: penstock\.(\w+)$", path.read_text(), re.MULTILINE)
        if path.name == "errors.md" or set(own) <= {"onnx_backend"}:
            continue
        assert [name for name in own if f"`{name}`" not in text] == [], path.name


def environment_variables() -> Iterator[str]:
    """Those that the code reads."""
    for path in (ROOT / "src/penstock").rglob("*.py"):
        yield from re.findall(r'"(PENSTOCK_[A-Z_]+)"', path.read_text())


def test_reference_lists_every_environment_variable_that_the_code_reads():
    listed = {
        re.findall(r"`(\w+)`", row[0])[0]
        for row in rows("reference/environment.md", "| variable |")
    }
    assert listed == set(environment_variables())


def test_configuration_of_packages_has_a_row_for_each_key():
    from penstock.frontends.nnpackage import options as wishes

    text = Path(wishes.__file__).read_text()
    keys = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+|[A-Z]{8})"', text)) - {"PENSTOCK_"}
    cells = " ".join(row[0] for row in rows("tflite.md", "| key | option"))
    assert {key for key in keys if f"`{key}" not in cells and f"{key}=" not in cells} == set()
    assert "OP_BACKEND_MAP" in keys and "BACKENDS" in keys


def test_page_of_examples_has_each_program_and_programs_that_are_there():
    programs = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert {
        re.findall(r"`(.*?)`", row[0])[0] for row in rows("how-to/examples.md", "| program")
    } == (programs)
    tests = "".join(
        (ROOT / "tests" / name).read_text()
        for name in ("test_examples.py", "test_generate.py", "test_demo.py")
    )
    for program in programs:
        assert re.search(rf"\b{program.removesuffix('.py')}\b", tests), program


def test_observers_page_names_the_observers_of_penstock():
    own = {n for n in ps.__all__ if isinstance(getattr(ps, n), type)}
    own = {n for n in own if issubclass(getattr(ps, n), observers.base.Observer)}
    text = (DOCS / "reference/observers.md").read_text()
    assert own == set(re.findall(r"^::: penstock\.(\w+)$", text, re.MULTILINE))


def test_page_on_serving_names_every_endpoint():
    pytest.importorskip("starlette")
    from penstock.serving import app

    text = prose("serving.md")
    paths = re.findall(r'"(/(?:v2|metrics)[^"]*)"', Path(app.__file__).read_text())
    assert len(paths) > 8
    for path in {*paths} - {*app._UNSUPPORTED}:
        shown = path.replace("{version}", "VERSION")
        shown = re.sub(r"\{(model|name)\}", "NAME", shown)
        name = shown.rsplit("/", 1)[1]
        # Routes are written in parts: the first of them may be all that stands in one string.
        assert f"`{shown}" in text or f"`{name}`" in text, path


def test_makefile_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE)) - {"help"}
    helped = set(re.findall(r'@echo "make ([\w-]+)', makefile))
    assert helped == targets
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == targets | {"help"}


MEANS = [  # a sentence of the front page, the file that it names, and the mean as that file has it
    ("one thread", "models", r"geometric mean of 25 of 25 \| 1 \|[ |]*(\d\.\d+)"),
    ("two threads", "models", r"geometric mean of 25 of 25 \| 2 \|[ |]*(\d\.\d+)"),
    ("exporters write", "zoo", r"\| all \| 1786 (?:\|[^|]*){4}\| (\d\.\d+)"),
    ("TFLite models", "tflite", r"Geometric mean of the ratios: (\d\.\d+)"),
    ("first answer", "start", r"\| geometric mean (?:\|[^|]*){9}\| (\d\.\d+)"),
    ("saved session", "start", r"\| geometric mean (?:\|[^|]*){8}\| (\d\.\d+)"),
]


@pytest.mark.parametrize(("row", "page", "mean"), MEANS)
def test_ratios_of_the_front_page_are_those_of_the_benchmarks(row, page, mean):
    front = (ROOT / "README.md").read_text()
    shown = re.search(rf"\|[^|\n]*{row}[^|\n]*\| (\d\.\d+) \| \[bench/{page}\.md\]", front)
    (measured,) = re.findall(mean, (ROOT / "bench" / f"{page}.md").read_text())
    assert shown is not None
    assert float(shown[1]) == pytest.approx(float(measured), abs=0.005)
