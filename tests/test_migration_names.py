"""What pages say of other runtimes: the names in their columns exist there.

Each runtime is looked at where it is installed; the others' rows are skipped.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
SAVED_MODELS = Path(__file__).parent / "models" / "tf_saved"
PAGES = [DOCS / "coming-from.md", *sorted(DOCS.glob("how-to/migrate-*.md"))]

# Variables and values of the programs that the cells are from.
_OF_PROGRAMS = {
    *("path", "or", "bytes", "names", "feeds", "core", "model", "session", "compiled", "x", "y"),
    *("folder", "name", "i", "shape", "tf", "op", "jobs", "callback", "data", "run_options"),
    *("infer_request", "fetches", "True", "CPU", "GPU", "f32", "bf16", "serving_default", "with"),
    "onnxruntime",
}


def cells() -> Iterator[tuple[str, str, str]]:
    """Runtime, page and cell of each row of a table whose first column is of another runtime."""
    for page in PAGES:
        runtime = ""
        for line in page.read_text().splitlines():
            first = line[1:].partition("|")[0].strip() if line.startswith("| ") else ""
            if first in RUNTIMES:
                runtime = first
            elif first and runtime:
                yield runtime, page.stem, first
            elif not line.startswith("|"):
                runtime = ""


def names_in(cell: str) -> list[str]:
    """The identifiers in the code of a cell, but for those of the program around it."""
    spans = [span for span in re.findall(r"`([^`]*)`", cell) if not span.startswith(".")]
    found = [name for span in spans for name in re.findall(r"[A-Za-z_]\w*", span)]
    return [name for name in found if name not in _OF_PROGRAMS]


def names_of(things: list[Any]) -> set[str]:
    """The names that modules and classes have: of attributes, and of parameters."""
    names: set[str] = set()
    for thing in things:
        names.update(dir(thing))
        for name in dir(thing):
            member = inspect.getattr_static(thing, name, None)
            inner = list(vars(member).values()) if inspect.isclass(member) else [member]
            names.update(dir(member) if inspect.isclass(member) else ())
            for function in inner:
                try:
                    names.update(inspect.signature(function).parameters)
                except (TypeError, ValueError):  # no function, or one in C without a signature
                    continue
    return names


def of_onnxruntime() -> set[str]:
    import onnxruntime

    names = names_of([onnxruntime, onnxruntime.SessionOptions, onnxruntime.RunOptions])
    names |= names_of([onnxruntime.InferenceSession, onnxruntime.ExecutionMode])
    assert import_module("onnxruntime.quantization")
    assert find_spec("onnxruntime.transformers")  # which imports what is not installed
    modules = {"quantization", "transformers"}
    return names | {*onnxruntime.get_available_providers(), *modules}


def of_openvino() -> set[str]:
    import openvino
    from openvino import preprocess
    from openvino.properties import hint

    core = openvino.Core()
    keys = {*core.get_property("CPU", "SUPPORTED_PROPERTIES"), *core.get_versions("HETERO")}
    for key in ("CACHE_DIR", "ENABLE_MMAP"):  # of all devices; raises where there is none
        core.get_property(key)
        keys.add(key)
    names = names_of([openvino, preprocess, openvino.Core, openvino.InferRequest, openvino.Model])
    return names | keys | names_of([openvino.CompiledModel, hint.PerformanceMode])


def of_tensorflow() -> set[str]:
    import tensorflow as tf

    one = tf.compat.v1
    loaded = tf.saved_model.load(str(next(p.parent for p in SAVED_MODELS.rglob("saved_model.pb"))))
    modules = [tf, tf.saved_model, tf.train, tf.debugging, tf.config, tf.config.optimizer]
    protocols = [one.ConfigProto, one.RunOptions]
    options = {field.name for protocol in protocols for field in protocol.DESCRIPTOR.fields}
    return names_of([*modules, one, one.train]) | {*dir(loaded)} | options


def of_litert() -> set[str]:
    from ai_edge_litert import compiled_model, hardware_accelerator, interpreter

    modules = [interpreter, compiled_model, hardware_accelerator]
    return names_of([*modules, interpreter.Interpreter])


RUNTIMES: dict[str, tuple[str, Callable[[], set[str]]]] = {
    "ONNX Runtime": ("onnxruntime", of_onnxruntime),
    "OpenVINO": ("openvino", of_openvino),
    "TensorFlow": ("tensorflow", of_tensorflow),
    "LiteRT": ("ai_edge_litert", of_litert),
}


@cache
def known(runtime: str) -> set[str]:
    return RUNTIMES[runtime][1]()


def test_tables_of_all_runtimes_are_found() -> None:
    count = {name: sum(runtime == name for runtime, _, _ in cells()) for name in RUNTIMES}
    assert min(count.values()) > 10, count


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_names_in_columns_of_other_runtimes_exist_there(runtime: str) -> None:
    pytest.importorskip(RUNTIMES[runtime][0], reason=f"{runtime} is not installed")
    wrong = {
        f"{page}: {cell}": missing
        for name, page, cell in cells()
        if name == runtime and (missing := [n for n in names_in(cell) if n not in known(runtime)])
    }
    assert wrong == {}
    assert "no_such_name" not in known(runtime)
