"""The library is found, loaded when needed, and leaves the environment as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import there


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
