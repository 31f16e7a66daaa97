"""The memory of a search: that of the float model and of one candidate at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.quantizing.rewriting import GraphRewriter
from penstock.quantizing.source import float_model

LAYERS, WIDTH = 8, 1024
WEIGHTS = LAYERS * WIDTH * WIDTH * 4

# The resident memory of a process at most, before and behind what is said.
MEASURED = """
import json, resource, sys, numpy as np, penstock as ps
from tests.quantizing.test_memory import WIDTH, wide

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

model, x = wide(), np.random.default_rng(1).standard_normal((8, 16, WIDTH)).astype(np.float32)
small = wide(1, 64)
ps.quantize(small, list(x[..., :64]), max_error=0.01, threads=1)
before = most()
with ps.compile(model, threads=1) as session:
    session.run({"x": x[0]})
alone = most()
points = ps.quantize(model, list(x), max_error=1e-3, threads=1, timeout=60).report["points"]
print(json.dumps([before, alone, most(), len(points)]))
"""


def wide(layers: int = LAYERS, width: int = WIDTH) -> ps.Model:
    """A chain of products."""
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    x = b.input("x", np.float32, (16, width))
    for _ in range(layers):
        w = rng.standard_normal((width, width)).astype(np.float32) / np.float32(width**0.5)
        x = b.op("Relu", x @ w)
    b.output("y", x)
    return b.model()


@pytest.mark.skipif(sys.platform != "linux", reason="bytes of ru_maxrss are Linux's")
def test_search_needs_the_model_and_one_candidate():
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, alone, whole, points = json.loads(done.stdout)
    assert points >= 2
    # Beside the weights themselves: those of a candidate (16 bits in the file, float32 until it is
    # compiled, 16 bits for its kernels), and 64 MiB of free memory.
    assert whole - before <= 2.75 * WEIGHTS + 2**26, (before, alone, whole)


def test_forms_do_not_hold_weights_that_kernels_have():
    model = float_model(wide(2, 256))
    rewriter = GraphRewriter(model.graph)
    weights = [layer.stored[0].value for layer in rewriter.layers]
    session = ps.compile(model)
    session.run({"x": np.zeros((16, 256), np.float32)})
    assert not any(value.is_held for value in weights)
    for type_ in ("dynamic", "weights8", "weights16", "bfloat16", "blocks8", "float32"):
        form = rewriter.rewritten({layer.name: type_ for layer in rewriter.layers}, {}, {})
        assert [layer.nbytes(type_) for layer in rewriter.layers]
        assert form.graph.nodes
        assert not any(value.is_held for value in weights)
