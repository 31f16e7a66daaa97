"""What inputs mean, and which positions rows see, by values."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.passes.lowering.step_probes import (
    Probe,
    Probes,
    prepared,
    roles_of,
    with_sizes_of_heads,
)
from tests.support.decoders import GROUPS, LAYERS, SIZE, decoder_model
from tests.support.onnx_text import model_from_text

LOW = np.float32(-3e38)


def bias_of(rows: int, past: int, window: int = 0) -> np.ndarray:
    own, before = np.arange(past, past + rows)[:, None], np.arange(past + rows)
    hidden = (before > own) | ((before <= own - window) if window else False)
    return np.where(hidden, LOW, np.float32(0))[None, None]


def test_roles_are_told_by_names_and_open_dims() -> None:
    roles = roles_of(ps.load(decoder_model("onnx")).graph)
    assert (roles.rows, roles.positions, roles.masks) == (["ids"], ["position_ids"], [])
    assert roles.caches == ["past_k0", "past_v0", "past_k1", "past_v1"]
    assert roles_of(ps.load(decoder_model("spelled")).graph).masks == ["mask"]


@pytest.mark.parametrize("dims", ["2, 3", "b", "b, s, t, 4, 5"])
def test_inputs_without_rows_or_a_past_have_no_role(dims: str) -> None:
    text = f"g (float[{dims}] x, float[b, 2, p, 4] past) => (float[{dims}] y) {{ y = Neg (x) }}"
    with pytest.raises(RowsStay, match="has neither an axis of rows"):
        roles_of(ps.load(model_from_text(text)).graph)


def test_positions_are_found_whatever_their_dims_and_dtype() -> None:
    values = {"a": np.arange(5.0, 8)[None, :, None], "b": np.arange(3), "c": np.arange(5, 11)}
    values |= {"d": np.arange(5, 8) + 0.5, "e": np.array([[5], [6], [8]])}
    probe = Probe(3, 5, values)
    assert [probe.offset_of(name) for name in "abcdef"] == [0, -5, None, None, None, None]


@pytest.mark.parametrize("window", [0, 1, 4, 7, 9])
def test_window_is_how_many_positions_a_row_sees(window: int) -> None:
    assert Probe(3, 5, {}).window(bias_of(3, 5, window)) == (window if window < 8 else 0)
    assert Probe(3, 5, {}).window(bias_of(3, 5, window) == 0) == (window if window < 8 else 0)


def test_other_biases_have_no_window() -> None:
    probe, bias = Probe(3, 5, {}), bias_of(3, 5)
    assert probe.window(np.zeros_like(bias)) is None  # rows see those behind them
    assert probe.window(bias[..., :-1]) is None
    assert probe.window(np.where(np.arange(8) == 2, LOW, bias)) is None


def test_heads_that_see_others_have_no_window() -> None:
    both = np.concatenate([bias_of(3, 5), bias_of(3, 5, 2)], 1)
    assert Probe(3, 5, {}).window(both) is None


def probes_of(kind: str, whole: bool = False, **options: int) -> Probes:
    graph = prepared(ps.load(decoder_model(kind, **options)).graph)
    return Probes(graph, roles_of(graph), whole)


@pytest.mark.parametrize("whole", [False, True])
def test_probes_have_what_a_graph_computes_of_lengths_alone(whole: bool) -> None:
    few, other = probes_of("window", whole).near
    assert few.offset_of("own") == other.offset_of("own") == 0
    assert other.window(other.values["bias"]) == 9
    assert "logits" not in few.values


def test_far_probes_have_ever_fewer_positions_and_are_kept() -> None:
    probes = probes_of("groups")
    far = [*probes.far]
    pasts = [probe.past for probe in far]
    assert pasts == sorted(pasts, reverse=True)
    assert pasts[0] > 100_000
    assert next(probes.far) is far[0]


def test_far_probes_have_no_more_positions_than_tables_of_the_model() -> None:
    assert next(probes_of("spelled", True, places=256).far).past == 253


@pytest.mark.parametrize("kind", ["groups", "packed"])
def test_size_of_heads_that_a_model_leaves_open_is_found(kind: str) -> None:
    model = decoder_model(kind)
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[3].dim_param = "size"
    graph = with_sizes_of_heads(ps.load(model).graph)
    shapes = {v.name: v.shape for v in graph.inputs}
    assert shapes["past_k0"] == ("b", GROUPS, "p", SIZE)
    assert len(roles_of(graph).caches) == 2 * LAYERS


def test_size_of_heads_follows_from_what_is_appended_to_a_cache() -> None:
    model = decoder_model("spelled")
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[3].dim_param = "size"
    graph = with_sizes_of_heads(ps.load(model).graph)
    shapes = {v.name: v.shape for v in graph.inputs}
    assert shapes["past_v1"] == ("b", GROUPS, "p", SIZE)
    assert len(roles_of(graph).caches) == 2 * LAYERS
