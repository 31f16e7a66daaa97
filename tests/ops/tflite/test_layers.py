"""The basic LSTM of TFLite, beside LiteRT."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.support.litert import by_litert, f
from tests.support.tflite_models import model, subgraph


def test_lstm_of_the_basic_kind_gives_what_litert_gives() -> None:
    """Its states are inputs and outputs."""
    feeds = {"x": f(2, 3), "h": f(2, 4), "c": f(2, 4)}
    options = ("LSTMOptions", {"kernel_type": 1, "fused_activation_function": 4})
    graph = subgraph(
        {key: ("float32", value.shape) for key, value in feeds.items()},
        [("LSTM", ["x", "h", "w", "b", "c"], ["y", "n", "j", "g"], options)],
        ["y", "n"],
        {"w": f(16, 7), "b": f(16)},
    )
    file = model([graph], versions={"LSTM": 2})
    got = ps.compile(file).run(feeds)
    for value, want in zip(got.values(), by_litert(file, feeds), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
