"""Recurrent layers in parts."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.onednn import recurrent_parts
from penstock.backends.onednn.library import library
from penstock.core.checkpoints import checkpoint
from tests.backends.onednn.forced import check, compile_on_onednn, ran_on
from tests.backends.onednn.test_recurrent import CASES, GATES, layer

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


@pytest.fixture
def looks(monkeypatch) -> list[int]:
    """Grows with each part of a layer, which are of few steps."""
    counted: list[int] = []
    monkeypatch.setattr(recurrent_parts, "checkpoint", lambda: counted.append(1))
    monkeypatch.setattr(recurrent_parts, "MOST_FLOPS", 300)
    return counted


@pytest.mark.parametrize(("direction", "layout", "batch", "state"), CASES)
@pytest.mark.parametrize("kind", GATES)
def test_parts_of_recurrent_layers_equal_numpy(kind, direction, layout, batch, state, looks):
    directions = 2 if direction == "bidirectional" else 1
    if directions == 2 and batch > 1 and not layout:
        pytest.skip("oneDNN has no such layer, as another test shows")
    options = {"direction": direction, "layout": layout, "batch": batch, "state": state}
    check(*layer(kind, sizes=(5, 5, 6), **options), kind)
    assert len(looks) >= 2 * 2 * directions  # of two runs


@pytest.mark.parametrize("outputs", [("y", "", ""), ("", "h", ""), ("", "", "c"), ("y", "", "c")])
@pytest.mark.parametrize("kind", GATES)
def test_parts_of_recurrent_layers_with_omitted_outputs(kind, outputs, looks):
    if kind == "LSTM" or any(outputs[:2]):
        for direction in ("reverse", "bidirectional"):
            check(*layer(kind, outputs=outputs, direction=direction), kind)
            assert looks


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_parts_of_recurrent_layers_let_go_of_their_weights_and_read_them_again(direction, looks):
    proto, feeds = layer("LSTM", direction=direction, sizes=(40, 70, 65))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    session = compile_on_onednn(proto, executor="linear")
    wanted = ps.compile(proto, backends=["numpy"])
    for steps in (40, 40, 7, 40):  # weights are let go of behind the first runs
        fed = {"x": feeds["x"][:steps]}
        for found, right in zip(session.run(fed).values(), wanted.run(fed).values(), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
        session.trim()
    assert ran_on(session, "LSTM") == {"onednn"}
    assert looks


def test_recurrent_layer_in_parts_ends_when_its_run_is_stopped(monkeypatch):
    monkeypatch.setattr(recurrent_parts, "MOST_FLOPS", 300)
    proto, feeds = layer("GRU")
    session = compile_on_onednn(proto, executor="linear")
    session.run(feeds)
    token = ps.CancelToken()
    monkeypatch.setattr(recurrent_parts, "checkpoint", lambda: (token.cancel(), checkpoint()))
    with pytest.raises(ps.Cancelled):
        session.run(feeds, cancel=token)
