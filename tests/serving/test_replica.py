"""One replica: of a session, of shared loops, and on a worker of a cluster."""

from __future__ import annotations

import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text
from tests.support.tflite_models import model as tflite_model
from tests.support.tflite_models import subgraph
from tests.support.timing import SOON

SUM = """g (int64 n) => (int64 y, int64 z) <bool yes = {1}, int64 zero = {0}> {
    y = Loop (n, yes, zero) <body = b (int64 i, bool c, int64 v) => (bool d, int64 w) {
        d = Identity (c) w = Add (v, i) }>
    z = Neg (y) }"""


def test_replicas_of_shared_loops_compute_iterations_of_requests_together():
    loops = ps.SharedLoops(model_from_text(SUM))
    with ps.Replicas(loops, 8) as replicas:
        futures = [replicas.submit({"n": n}, ["y"]) for n in range(32)]
        results = [future.result(SOON) for future in futures]
        assert results == [{"y": n * (n - 1) // 2} for n in range(32)]
        assert replicas.run_here({"n": 3}) == {"y": 3, "z": -3}
        with pytest.raises(ps.InvalidInput, match=r"cannot fetch 'v': .* outputs"):
            replicas.run({"n": 1}, ["v"])
        with pytest.raises(
            ps.InvalidInput, match=r"a value is missing for each of these inputs: 'n'"
        ):
            replicas.run({})
        with pytest.raises(ps.DeadlineExceeded):
            replicas.run({"n": 10**9}, timeout=0.2)
    assert loops.stats.iterations > loops.stats.steps
    with pytest.raises(ValueError, match="share iterations"):
        ps.Replicas(loops, max_batch=2)
    with pytest.raises(TypeError, match="is already compiled"):
        ps.Replicas(loops, threads=2)


def test_signature_chooses_the_entry_of_replicas_on_workers(tmp_path):
    x = {"x": ("float32", [2])}
    graphs = [subgraph(x, [(op, ["x"], ["y"], None)], ["y"]) for op in ("NEG", "ABS")]
    signature = {
        "signature_key": "absolute",
        "inputs": [{"name": "signed", "tensor_index": 0}],
        "outputs": [{"name": "unsigned", "tensor_index": 1}],
        "subgraph_index": 1,
    }
    path = tmp_path / "m.tflite"
    path.write_bytes(tflite_model(graphs, signature_defs=[signature]))

    class Workers:
        workers = 1

        def each_worker(self):
            return [ps.SimulatedCluster(1, bandwidth=1e9, latency=1e-6)]

    with ps.Replicas(path, cluster=Workers(), signature="absolute") as replicas:
        assert [port.name for port in replicas.session.inputs] == ["signed"]
