"""Backends by name, and what is refused as a backend."""

from __future__ import annotations

import pytest
from onnx import parser

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.backends.registry import BACKENDS, available, backend_of, backends_of, describe

MODEL = '<ir_version: 9, opset_import: ["" : 20]> g (float[3] x) => (float[3] y) { y = Neg(x) }'


def test_available_backends_are_registered_and_end_with_numpy():
    assert set(available()) <= set(BACKENDS)
    assert available()[-1] == "numpy"
    for name in available():
        assert backend_of(name).name == name
        assert name in describe(name).lower()
        assert repr(backend_of(name)).endswith(f"({name!r})")


def test_backends_by_default_are_those_available():
    assert [backend.name for backend in backends_of(None)] == list(available())


def test_backends_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two of one name"):
        backends_of(["numpy", NumpyBackend()])


def test_compile_with_an_object_that_is_no_backend_says_so():
    with pytest.raises(TypeError, match="int, which is no backend"):
        ps.compile(parser.parse_model(MODEL), backends=[3])
