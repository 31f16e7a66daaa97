"""Plans run no reference code of oneDNN, which is tens of times slower than its other code.

What is run is counted by oneDNN itself (ONEDNN_VERBOSE), in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from bench.models import models

import penstock as ps
from penstock.backends import registry
from tests.backends.onednn.exported_quantized_net import FEEDS, FORMS, quantized
from tests.support.sweeps import drawn, sweep

pytestmark = pytest.mark.skipif("onednn" not in registry.available(), reason="needs oneDNN")

ROOT = Path(__file__).parents[3]
RUN = """
import sys
import numpy as np
import penstock as ps
from bench import nets
session = ps.compile(eval(sys.argv[1]), threads=int(sys.argv[2]))
rng = np.random.default_rng(0)
sizes = {"b": 1, "s": 1, "p": 9, "t": 10, "steps": 7}
feeds = {}
for port in session.inputs:
    dims = [dim if isinstance(dim, int) else sizes[dim] for dim in port.type.shape]
    real = port.type.dtype.kind == "f"
    feeds[port.name] = rng.standard_normal(dims).astype("f") if real else np.ones(dims, "i8")
session.run(feeds)
"""
RUN_MODEL = """
import sys
import penstock as ps
from bench.models import models
model = next(model for model in models() if model.name == sys.argv[1])
session = ps.compile(model.path(), threads=int(sys.argv[2]))
session.run(model.feeds())
"""
RUN_QUANTIZED = """
import sys
import penstock as ps
from tests.backends.onednn.exported_quantized_net import FEEDS, quantized
ps.compile(quantized(sys.argv[1]), threads=int(sys.argv[2])).run(FEEDS)
"""
NETS = [
    *[f"nets.windows({batch})" for batch in (1, 3, 8)],
    *[f"nets.encoder({n}, 768, 12, 1, masked=True)" for n in (16, 49, 128, 512)],
    "nets.encoder(1500, 384, 6, 1, masked=False)",
    "nets.encoder(49, 128, 4, 1, masked=True, batch=5)",
    *[f"nets.gpt2('{weights}', 1)" for weights in ("float32", "int8", "int4", "dynamic")],
    *[f"nets.llama('{w}', True, layers=1)" for w in ("float32", "int8", "int4", "dynamic")],
    "nets.llama('float32', False, layers=1)",
    *[
        f"nets.keras_loop('{cell}', 7, {batch}, 64, 128)"
        for cell in ("LSTM", "GRU")
        for batch in (1, 8)
    ],
    "nets.script_loop(1, 64, 128)",
    "nets.scan(7, 3, 64, 128)",
]


def executed(code: str, net: str, threads: int = 1) -> list[str]:
    """The primitives that a run executes, as oneDNN writes them: kind, implementation and so on."""
    command = [sys.executable, "-c", code, net, str(threads)]
    variables = {**os.environ, "ONEDNN_VERBOSE": "profile_exec"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if ",exec," in line]


def reference_code(lines: list[str]) -> list[str]:
    """Those whose implementation is a reference one, at least in part."""
    found = []
    for line in lines:
        implementation = line.split(",exec,", 1)[1].split(",")[2]
        parts = implementation.replace("+", " ").split()
        if any(part.startswith("ref") for part in parts):
            found.append(line)
    return found


def test_library_tells_what_it_executes():
    assert executed(RUN, "nets.windows(1)")


@pytest.mark.parametrize("net", drawn(NETS, 1))
def test_networks_run_no_reference_code(net):
    assert not reference_code(executed(RUN, net))


@pytest.mark.parametrize("case", sweep(product(FORMS, (1, 2)), 1), ids=str)
def test_quantized_networks_run_no_reference_code(case):
    assert not reference_code(executed(RUN_QUANTIZED, *case))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", drawn([model.name for model in models()], 1))
def test_benchmark_models_run_no_reference_code(name, threads):
    model = next(model for model in models() if model.name == name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter
            model.path()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"the model is not there: {error}")
    assert not reference_code(executed(RUN_MODEL, name, threads))


@pytest.mark.parametrize("form", FORMS)
def test_quantized_networks_run_as_on_onnx_runtime(form):
    """The networks that are counted are those that were meant: within two steps of 8-bit codes."""
    model = quantized(form)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, FEEDS)
    (y,) = ps.compile(model).run(FEEDS).values()
    assert np.abs(y - wanted).max() < 2 / 127 * np.abs(wanted).max()


def test_reference_code_is_told_by_its_name():
    line = "onednn_verbose,v1,primitive,exec,cpu,{},{},undef,src_f32,attr-scratchpad:user ,,1,0.01"
    names = ["ref:any", "brg:avx512_core", "jit:uni+ref", "simple:any", "ref"]
    found = reference_code([line.format("matmul", name) for name in names])
    assert [names[0], names[2], names[4]] == [each.split(",")[6] for each in found]
