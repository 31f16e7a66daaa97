"""The benchmark of sequences: small networks of each kind, and the list of what is measured."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from bench.sequences import cases

import penstock as ps
from bench import nets
from tests.support.exact_runtime import exact_session

NETS = {
    "windows": lambda: nets.windows(1, 28, 32, 2),
    "encoder": lambda: nets.encoder(9, 32, 4, 2, masked=True),
    "encoder that normalizes first": lambda: nets.encoder(9, 32, 4, 2, masked=False),
    "gpt2": lambda: nets.gpt2("float32", 1, 64, 4),
    "gpt2 with 8-bit codes": lambda: nets.gpt2("dynamic", 1, 64, 4),
    "llama": lambda: nets.llama("float32", False, layers=1, width=64, heads=4, groups=2, inner=96),
    "llama in groups": lambda: nets.llama(
        "float32", True, layers=1, width=64, heads=4, groups=2, inner=96, bias=True
    ),
    "keras lstm": lambda: nets.keras_loop("LSTM", 7, 2, 8, 16),
    "keras gru": lambda: nets.keras_loop("GRU", 7, 2, 8, 16),
    "script": lambda: nets.script_loop(2, 8, 16),
    "scan": lambda: nets.scan(7, 2, 8, 16),
    "counting": nets.counting_loop,
}
SIZES = {"b": 1, "s": 1, "p": 5, "steps": 7}


def feeds_of(session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), {}
    for port in session.get_inputs():
        dims = [SIZES.get(dim, dim) for dim in port.shape]
        if "int64" in port.type:
            feeds[port.name] = np.full(dims, 3 if not dims else 1)
        else:
            feeds[port.name] = rng.standard_normal(dims).astype(np.float32)
    return feeds


@pytest.mark.parametrize("name", NETS)
def test_network_is_a_model_that_runs_as_on_onnx_runtime(name):
    model = NETS[name]()
    onnx.checker.check_model(model)
    session = exact_session(model.SerializeToString())
    feeds = feeds_of(session)
    outputs = ps.compile(model).run(feeds).values()
    for y, wanted in zip(outputs, session.run(None, feeds), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks_are_near_those_of_onnx_runtime(bits):
    """ONNX Runtime rounds the other operand to 8 bits."""
    net = nets.Net()
    y = nets.linear(net, net.input("x", [1, 64]), 64, 96, f"int{bits}")
    net.output(y, "y", [1, 96])
    model = net.model()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = feeds_of(session)
    (wanted,) = session.run(None, feeds)
    difference = ps.compile(model).run(feeds)["y"] - wanted
    assert np.abs(difference).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.costly
def test_decoders_are_fed_their_caches_back():
    decoders = [case for case in cases() if case.fed_back]
    assert len(decoders) == 4 * 4 * 2
    for case in decoders:
        feeds = case.feeds()
        assert list(case.fed_back) == list(feeds)[1:]
        assert list(case.fed_back.values()) == list(range(len(feeds) - 1))
