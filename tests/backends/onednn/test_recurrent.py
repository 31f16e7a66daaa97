"""LSTM, GRU and RNN: oneDNN against the NumPy backend."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from penstock.backends.onednn.library import library
from penstock.ops.common.constant_cache import held
from tests.backends.onednn.forced import check, compile_on_onednn, one_node, ran_on, refused

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


rng = np.random.default_rng(0)


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


STATES = ("y", "h", "c")


def draw(*shape: int) -> np.ndarray:
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def layer(
    kind,
    *,
    direction="forward",
    batch=1,
    layout=0,
    state="none",
    outputs=("y", "h", "c"),
    bias=True,
    sizes=(4, 5, 6),
    late=(),
    lengths=None,
    **attrs,
):
    """A model of one layer, and what to feed it. The initial ``state`` is none, constant or fed."""
    steps, width, hidden = sizes
    n, gates = 1 + (direction == "bidirectional"), GATES[kind]
    feeds = {"x": draw(batch, steps, width) if layout else draw(steps, batch, width)}
    # Small enough for rounding errors to fade.
    small = np.float32(1 / np.sqrt(hidden))
    constants = {"w": draw(n, gates * hidden, width), "r": small * draw(n, gates * hidden, hidden)}
    names = ["x", "w", "r", "", "", ""]
    if bias:
        constants["b"] = draw(n, 2 * gates * hidden)
        names[3] = "b"
    if lengths is not None:
        constants["lengths"] = np.array(lengths, np.int32)
        names[4] = "lengths"
    if state != "none":
        for i, name in enumerate(["h0", "c0"][: 1 + (kind == "LSTM")]):
            shape = (batch, n, hidden) if layout else (n, batch, hidden)
            (feeds if state == "fed" else constants)[name] = draw(*shape)
            names[5 + i : 6 + i] = [name]
    for name in late:
        feeds[name] = constants.pop(name)
    while not names[-1]:
        names.pop()
    proto = one_node(
        kind,
        feeds,
        constants,
        inputs=names,
        outputs=outputs if kind == "LSTM" else outputs[:2],
        hidden_size=hidden,
        direction=direction,
        layout=layout,
        **attrs,
    )
    return proto, feeds


CASES = list(
    itertools.product(
        ["forward", "reverse", "bidirectional"], [0, 1], [1, 3], ["none", "constant", "fed"]
    )
)


@pytest.mark.parametrize(("direction", "layout", "batch", "state"), CASES)
@pytest.mark.parametrize("kind", GATES)
def test_recurrent_layers_equal_numpy(kind, direction, layout, batch, state):
    proto, feeds = layer(kind, direction=direction, layout=layout, batch=batch, state=state)
    if direction == "bidirectional" and batch > 1 and not layout:
        refused(proto, feeds, kind)
    else:
        check(proto, feeds, kind)


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_plans_for_other_shapes_share_weights(kind):
    proto, feeds = layer(kind)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    session = compile_on_onednn(proto, executor="linear")
    session.run(feeds)
    gc.collect()  # what other tests have left
    before = held()
    for steps in range(5, 9):
        session.run({"x": draw(steps, 1, 5)})
    assert held() == before
    assert ran_on(session, kind) == {"onednn"}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("state", ["none", "fed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_gru_with_linear_before_reset(direction, batch, state):
    for bias in (True, False):
        proto, feeds = layer(
            "GRU",
            direction=direction,
            layout=1,
            batch=batch,
            state=state,
            bias=bias,
            linear_before_reset=1,
        )
        check(proto, feeds, "GRU")


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("wanted", [("y",), ("h",), ("c",), ("y", "h"), ("y", "c"), ("h", "c")])
def test_recurrent_layers_with_omitted_outputs(kind, wanted):
    outputs = [name if name in wanted else "" for name in STATES]
    if kind != "LSTM" and not any(outputs[:2]):
        return
    for state in ("none", "fed"):
        check(*layer(kind, batch=2, state=state, outputs=outputs), kind)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (1, 16, 16), (30, 7, 33), (3, 130, 65)])
@pytest.mark.parametrize("kind", GATES)
def test_recurrent_layers_of_many_sizes(kind, sizes):
    for batch in (1, 4):
        check(*layer(kind, sizes=sizes, batch=batch, bias=False, state="fed"), kind)


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "Tanh"])
def test_rnn_activations_equal_numpy(activation):
    check(*layer("RNN", activations=[activation]), "RNN")
    proto, feeds = layer("RNN", direction="bidirectional", activations=[activation] * 2)
    check(proto, feeds, "RNN")


def test_equal_sequence_lengths_run_on_onednn():
    check(*layer("GRU", batch=3, lengths=[4, 4, 4]), "GRU")
    refused(*layer("GRU", batch=3, lengths=[4, 3, 4]), "GRU")


def test_lstm_with_one_of_two_states():
    for name in ("h0", "c0"):
        feeds = {"x": draw(4, 2, 5), name: draw(1, 2, 6)}
        constants = {"w": draw(1, 24, 5), "r": draw(1, 24, 6)}
        names = ["x", "w", "r", "", "", "h0" if name == "h0" else "", "c0" if name == "c0" else ""]
        proto = one_node("LSTM", feeds, constants, inputs=names, outputs=STATES, hidden_size=6)
        check(proto, feeds, "LSTM")


def test_recurrent_layer_reads_a_view():
    feeds = {"x": draw(2, 4, 5)}
    constants = {"w": draw(1, 18, 5), "r": draw(1, 18, 6)}
    proto = one_node("GRU", feeds, constants, perm=(1, 0, 2), outputs=("y", "h"), hidden_size=6)
    check(proto, feeds, "GRU")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"clip": 0.1}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"]}),
        ("RNN", {"activations": ["Softsign"]}),
        ("RNN", {"activations": ["Tanh", "Relu"], "direction": "bidirectional"}),
        ("RNN", {"clip": 0.1}),
        ("RNN", {"late": ["w"]}),
        ("GRU", {"late": ["b"]}),
    ],
)
def test_recurrent_layers_that_onednn_lacks_run_on_numpy(kind, options):
    refused(*layer(kind, **options), kind)


def test_lstm_with_peepholes_runs_on_numpy():
    feeds = {"x": draw(4, 1, 5)}
    constants = {"w": draw(1, 24, 5), "r": draw(1, 24, 6), "p": draw(1, 18)}
    names = ["x", "w", "r", "", "", "", "", "p"]
    refused(one_node("LSTM", feeds, constants, inputs=names, hidden_size=6), feeds, "LSTM")
