"""oneDNN's library, and the wrappers around its structures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.backends.onednn import declarations
from penstock.backends.onednn.library import DnnlError, Library, library
from penstock.backends.onednn.primitive import (
    BIAS,
    DST,
    SCRATCHPAD,
    SRC,
    WEIGHTS,
    Primitive,
    descriptor,
    descriptor_of,
    memory,
    reordered,
)

there = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


@pytest.fixture
def dnnl() -> Library:
    found = library()
    assert found is not None
    return found


def test_generated_bindings_match_the_declarations(tmp_path):
    assert declarations.GENERATED.read_text() == declarations.generate(tmp_path), (
        "run python -m penstock.backends.onednn.declarations"
    )


@there
def test_library_has_version_and_instruction_set(dnnl):
    assert dnnl.version[0] == 3
    assert dnnl.isa
    assert "libdnnl" in dnnl.path
    assert library() is dnnl


def in_a_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


LOAD = """
import penstock as ps
from penstock.backends.onednn.library import library
try:
    print(library() is not None)
except ps.PenstockError as error:
    print(error)
"""


@there
def test_library_named_in_the_environment_is_loaded(dnnl, tmp_path):
    assert in_a_process(LOAD, PENSTOCK_DNNL=dnnl.path) == "True"
    text = tmp_path / "libdnnl.so.3"
    text.write_text("not a library")
    for path in (text, tmp_path / "nowhere.so"):
        said = in_a_process(LOAD, PENSTOCK_DNNL=str(path))
        assert (
            said == f"PENSTOCK_DNNL={path} cannot be loaded as oneDNN 3: unset it, or name another"
        )


def test_library_that_is_no_onednn_is_refused():
    program = "from penstock.backends.onednn.library import _open; print(_open('libm.so.6'))"
    assert in_a_process(program) == "None"


@there
def test_loading_restores_the_environment(dnnl):
    program = "import os; before = dict(os.environ); from penstock.backends.onednn.library import library; library(); print(before == os.environ)"
    assert in_a_process(program) == "True"
    assert in_a_process(program, OMP_WAIT_POLICY="passive") == "True"


@there
@pytest.mark.parametrize(
    ("said", "policy", "spins"),
    [
        ({}, "ACTIVE", "3000"),
        ({"OMP_WAIT_POLICY": "passive"}, "PASSIVE", "0"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
    ],
)
def test_openmp_spin_settings_of_the_user_are_kept(said, policy, spins):
    # the runtime says so on the error output when it is loaded
    program = (
        "import os; os.dup2(1, 2); from penstock.backends.onednn.library import library; library()"
    )
    shown = in_a_process(program, OMP_DISPLAY_ENV="verbose", **said)
    assert f"OMP_WAIT_POLICY = '{policy}'" in shown
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown


@there
def test_import_does_not_load_the_library():
    program = """
import sys, numpy as np, penstock as ps
from onnx import parser
model = parser.parse_model('<ir_version: 9, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Neg(x) }')
ps.compile(model, backends=["numpy"]).run({"x": np.ones(2, np.float32)})
print(any("onednn" in name or "_cffi" in name for name in sys.modules))
"""
    assert in_a_process(program) == "False"


def product(dnnl: Library, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, as_it_likes: bool):
    """A primitive for c = a @ b, with what its weights must be."""
    lib = dnnl.lib
    source, target = descriptor_of(dnnl, a), descriptor_of(dnnl, c)
    weights = descriptor(dnnl, b.shape, b.dtype) if as_it_likes else descriptor_of(dnnl, b)
    made = Primitive(dnnl, "matmul", [source, weights, None, target])
    if as_it_likes:
        layout = made.query(lib.dnnl_query_weights_md)
        weights_memory = memory(dnnl, layout, reordered(dnnl, b, layout))
    else:
        weights_memory = memory(dnnl, weights, b)
    scratch = np.empty(made.scratchpad, np.uint8)
    return made, {
        SRC: memory(dnnl, source, a),
        WEIGHTS: weights_memory,
        DST: memory(dnnl, target, c),
        SCRATCHPAD: memory(dnnl, made.query(lib.dnnl_query_scratchpad_md), scratch),
    }


@there
@pytest.mark.parametrize("as_it_likes", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_matmul_primitive_of_strided_matrices_is_right(dnnl, as_it_likes, transposed):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 7)).astype(np.float32)
    b = rng.standard_normal((9, 7)).astype(np.float32).T
    if transposed:
        a = np.asfortranarray(a)
    c = np.full((5, 18), 7, np.float32)[:, ::2]
    made, memories = product(dnnl, a, b, c, as_it_likes=as_it_likes)
    assert made.implementation
    made.run(memories)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)
    np.testing.assert_array_equal(c.base[:, 1::2], 7)


@there
@pytest.mark.parametrize("channels_last", [True, False])
def test_convolution_primitive_in_both_layouts_is_right(dnnl, channels_last):
    lib = dnnl.lib
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, 6, 6)).astype(np.float32)
    w = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(4).astype(np.float32)
    y = np.empty((1, 4, 6, 6), np.float32)
    if channels_last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        y = np.empty((1, 6, 6, 4), np.float32).transpose(0, 3, 1, 2)
    source, biases, target = (descriptor_of(dnnl, array) for array in (x, bias, y))
    tensors = [source, descriptor(dnnl, w.shape, w.dtype), biases, target]
    geometry = [[1, 1], [0, 0], [1, 1], [1, 1]]
    made = Primitive(dnnl, "convolution_forward", ["convolution_direct", *tensors, *geometry])
    scratch = np.empty(made.scratchpad, np.uint8)
    layout = made.query(lib.dnnl_query_weights_md)
    made.run(
        {
            SRC: memory(dnnl, source, x),
            WEIGHTS: memory(dnnl, layout, reordered(dnnl, w, layout)),
            BIAS: memory(dnnl, biases, bias),
            DST: memory(dnnl, target, y),
            SCRATCHPAD: memory(dnnl, made.query(lib.dnnl_query_scratchpad_md), scratch),
        }
    )
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    want = np.einsum("nchwij,ocij->nohw", windows, w) + bias[:, None, None]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@there
def test_call_keeps_its_memory_alive(dnnl):
    a, b = np.eye(4, dtype=np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
    c = np.empty((4, 4), np.float32)

    def call():
        made, memories = product(dnnl, a, b, c, as_it_likes=True)
        return made.call(memories)

    function, arguments = call()
    gc.collect()
    trash = [np.full(64, i, np.float32) for i in range(200)]
    for _ in range(3):
        c[:] = 0
        assert function(*arguments) == 0
        np.testing.assert_array_equal(c, b)
    assert len(trash) == 200


@there
def test_missing_primitive_raises_dnnl_error(dnnl):
    a, b, c = (np.ones(shape, np.float32) for shape in ((2, 3), (4, 5), (2, 5)))
    with pytest.raises(DnnlError, match="status 2") as caught:
        product(dnnl, a, b, c, as_it_likes=False)
    assert isinstance(caught.value, ps.PenstockError)
