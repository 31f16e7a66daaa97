"""Bounds of results that kernels apply as they store them."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from penstock.backends.native.bounds import bounds_of, scalar_operand
from penstock.backends.native.kernel import site_of
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.registry import standard

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")

TYPE = TensorType(FLOAT32, (2, 3))


def bounds(name: str, *constants: float | None) -> tuple[float, float] | None:
    """The bounds of an operation on x and scalar constants, None where one is left out."""
    scalars = [None if c is None else Value("c", const=np.float32([c])) for c in constants]
    x = Value("x", TYPE)
    node = Node(standard(name), [x, *scalars], [Value("y", TYPE)])
    native = library()
    assert native is not None
    site = site_of(native, node, [None if v is None else v.type for v in node.inputs])
    assert site is not None
    # As in a fused node, of which x is a result inside.
    place = {value: i for i, value in enumerate(node.inputs) if value is not x}
    return bounds_of(site, place, [node])


@pytest.mark.parametrize(
    ("name", "constants", "expected"),
    [
        ("Relu", (), (0.0, math.inf)),
        ("Clip", (-1.0, 6.0), (-1.0, 6.0)),
        ("Clip", (None, 6.0), (-math.inf, 6.0)),
        ("Max", (0.5,), (0.5, math.inf)),
        ("Min", (0.5,), (-math.inf, 0.5)),
        ("Min", (math.nan,), None),
        ("Exp", (), None),
    ],
)
def test_bounds_of_an_operation_with_constants(name, constants, expected) -> None:
    assert bounds(name, *constants) == expected


def test_scalar_operand_of_two_tensors_is_none() -> None:
    node = Node(standard("Max"), [Value("x", TYPE), Value("z", TYPE)], [Value("y", TYPE)])
    native = library()
    assert native is not None
    site = site_of(native, node, [TYPE, TYPE])
    assert site is not None
    assert scalar_operand(site, {value: i for i, value in enumerate(node.inputs)}, node) is None


def test_layers_with_bounds_import_no_programs() -> None:
    program = (
        "import sys\n"
        "import penstock.backends.native.dense, penstock.backends.native.image_convolution\n"
        "print('penstock.backends.native.elementwise' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
