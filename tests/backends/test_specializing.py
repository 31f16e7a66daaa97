"""Backends whose kernels are made for known shapes."""

from __future__ import annotations

import subprocess
import sys

from penstock.backends.numpy import NumpyBackend
from penstock.backends.specializing import estimates, plausible
from penstock.core.types import FLOAT32, TensorType, is_static
from penstock.ir.graph import Node, Value
from penstock.ops import find

KNOWN, OPEN = TensorType(FLOAT32, (2, 3)), TensorType(FLOAT32, (None, 3))


def exp(type_: TensorType) -> Node:
    op = find("Exp", "", 13)
    assert op is not None
    return Node(op, [Value("x", type_)], [Value("y", type_)])


def test_plausible_node_of_known_shapes_is_the_node() -> None:
    node = exp(KNOWN)
    assert plausible(node) is node


def test_plausible_node_of_unknown_dims_has_known_ones() -> None:
    node = exp(OPEN)
    guessed = plausible(node)
    assert guessed is not node
    values = [*guessed.inputs, *guessed.outputs]
    assert all(value is not None and is_static(value.type) for value in values)


def test_estimates_are_those_of_backends_for_known_shapes() -> None:
    backend, node = NumpyBackend(), exp(KNOWN)
    assert estimates([backend], node) == [backend.seconds(node)]


def test_estimates_of_unknown_dims_count_the_look_at_shapes() -> None:
    backend = NumpyBackend()
    (seconds,) = estimates([backend], exp(OPEN))
    assert seconds >= backend.seconds(plausible(exp(OPEN))) > 0


def test_nodes_of_known_shapes_import_nothing_of_others() -> None:
    program = (
        "import sys, numpy as np, penstock\n"
        "from penstock.backends.specializing import plausible\n"
        "from penstock.backends.native.backend import NativeBackend\n"
        "print('penstock.backends.dynamic_shapes' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
