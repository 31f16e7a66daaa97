"""Tests of kernels and their facets."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.records import replace
from penstock.ir.kernel import (
    NO_LAYOUT_HINTS,
    NO_MEMORY_USE,
    NO_PACKED_CONSTANTS,
    NO_RUNTIME_SHAPES,
    OWN_DEVICE,
    Binder,
    Kernel,
    LayoutHints,
)

X = np.array([1, 4], np.float32)


def test_kernel_without_facets_shares_those_that_say_nothing() -> None:
    kernel = Kernel(np.sqrt)
    assert kernel.layout is NO_LAYOUT_HINTS
    assert kernel.packed is NO_PACKED_CONSTANTS
    assert kernel.device is OWN_DEVICE
    assert kernel.memory is NO_MEMORY_USE
    assert kernel.shapes is NO_RUNTIME_SHAPES


def test_replaced_facet_leaves_the_others_shared() -> None:
    kernel = replace(Kernel(np.sqrt), layout=LayoutHints(contiguous=True))
    assert kernel.layout.contiguous and not kernel.layout.dims_order
    assert kernel.memory is NO_MEMORY_USE


def test_kernel_without_binder_binds_into() -> None:
    y = np.empty_like(X)
    function, arguments = Kernel(np.sqrt, np.sqrt).bind([X], [y], None)
    assert function is np.sqrt and arguments[0] is X and arguments[1] is y


def test_workspace_is_the_last_argument_of_a_bound_call() -> None:
    workspace = np.empty(64, np.uint8)
    _, arguments = Kernel(np.sqrt, np.sqrt, workspace=64).bind([X], [X], workspace)
    assert arguments[-1] is workspace


def test_binder_takes_the_place_of_into() -> None:
    class Fixed(Binder):
        def bind(self, inputs, outputs, workspace):
            return np.negative, (*inputs, *outputs)

    binder = Fixed()
    assert Kernel(np.sqrt, np.sqrt, binder).bind([X], [X], None)[0] is np.negative
    assert binder.implementation == "" and binder.compiled_call is None


def test_binder_must_have_bind() -> None:
    with pytest.raises(NotImplementedError):
        Binder().bind([X], [X], None)
