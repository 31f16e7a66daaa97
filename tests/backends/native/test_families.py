"""The registry of the native families: its index, its laziness, and what it gives a node."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import native
from penstock.backends.native import family, family_of, of_any_shape
from penstock.core.errors import InternalError
from penstock.ops.internal.fused import fused
from tests.support.native_kernels import node_of
from tests.support.onnx_text import compile_text
from tools.families import index_text


def test_index_names_what_the_modules_register() -> None:
    assert Path(native.INDEX).read_text() == index_text(), "run 'make kernels', which writes it"


def test_modules_have_no_name_of_the_registry() -> None:
    """Importing a module would replace what has its name in the package."""
    definitions = ast.parse(Path(native.__file__).read_text()).body
    own = {node.name for node in definitions if isinstance(node, ast.FunctionDef)}
    stems = {path.stem for path in Path(native.INDEX).parent.glob("*.py")}
    assert stems & own == set()


def test_backend_imports_no_family_before_one_is_looked_up() -> None:
    program = (
        "import sys, penstock.backends.native.backend\n"
        "from penstock.backends.native import INDEX\n"
        "modules = [w[:-1] for w in open(INDEX).read().split() if w.endswith(':')]\n"
        "print(len(modules), [m for m in modules if f'penstock.backends.native.{m}' in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    count, _, imported = done.stdout.partition(" ")
    assert int(count) > 20
    assert imported == "[]\n"


def test_family_of_operation_in_two_files_has_both_forms() -> None:
    x = np.array([1, 2], np.int64)
    attrs = {"keys_int64s": [1], "values_int64s": [2]}
    node = node_of("LabelEncoder", [x], domain="ai.onnx.ml", version=2, **attrs)
    encoder = family_of(node)
    assert encoder is not None
    assert encoder.static is not None
    assert encoder.any_shape is not None
    assert encoder.static.__module__ != encoder.any_shape.__module__


def test_family_of_fused_node_follows_what_it_begins_with() -> None:
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    product, relu = node_of("MatMul", [x, w]), node_of("Relu", [x])
    of_product, of_chain = family_of(fused([product])), family_of(fused([relu]))
    assert of_product is not None
    assert of_chain is not None
    assert of_product.static.__name__ == "product_call"  # type: ignore[union-attr]
    assert of_chain.static.__name__ == "elementwise_call"  # type: ignore[union-attr]


def test_family_of_operation_without_kernels_is_none() -> None:
    assert family_of(node_of("Compress", [np.ones(3), np.ones(3, np.bool_)])) is None


@pytest.mark.parametrize("register", [family, of_any_shape])
def test_register_twice_raises(register: object) -> None:
    assert callable(register)
    decorator = register("com.example.RegisteredTwice")
    decorator(lambda *arguments: None)
    with pytest.raises(InternalError, match=r"two native families register com\.example"):
        decorator(lambda *arguments: None)


@pytest.mark.parametrize(
    ("cores", "flops", "blocks"),
    [(1, 62e6, 5), (2, 2e6, 5), (2, 62e6, 12), (2, 14e6, 7), (16, 62e6, 31)],
)
def test_long_products_have_more_blocks_than_threads(monkeypatch, cores, flops, blocks):
    """So that threads end at the same time though blocks and panels are unequal."""
    monkeypatch.setattr(native, "core_budget", lambda: cores)
    assert native.blocks_of_rows(784, 2, 192, flops) == blocks


def test_calls_are_as_large_as_their_arrays_need():
    """A plan has a call for each step: 64 arguments and 4 results at most took 1,288 bytes."""
    session = compile_text("g (float[64] x) => (float[64] y) { y = Sigmoid(x) }", shapes={})
    (step,) = session.inspect.plan.walk()
    assert step.kernel is not None
    assert sys.getsizeof(step.kernel.function.__self__) <= 600  # type: ignore[attr-defined]
