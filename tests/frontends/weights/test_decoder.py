"""Decoders of weights give what ``transformers`` gives, with and without a past."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.weight_cases import WeightCase, cases

CASES = {name: case for name, case in cases().items() if not case.is_encoder}


def logits(session: ps.Session, case: WeightCase, steps: Sequence[int]) -> np.ndarray:
    """Those of all rows, which are fed in steps of so many."""
    ids = case.inputs["input_ids"]
    pasts = {
        port.name: np.zeros((len(ids), port.type.shape[1], 0, port.type.shape[3]), np.float32)
        for port in session.inputs
        if port.name.startswith("past")
    }
    results, at = [], 0
    for count in steps:
        positions = np.tile(np.arange(at, at + count), (len(ids), 1))
        feeds = {"input_ids": ids[:, at : at + count], "position_ids": positions, **pasts}
        outputs = session.run(feeds)
        results.append(outputs["logits"])
        pasts = {name: outputs[name.replace("past_key_values", "present")] for name in pasts}
        at += count
    return np.concatenate(results, 1)


@pytest.mark.parametrize("name", CASES)
def test_decoder_of_a_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    session = ps.compile(ps.load(CASES[name].write(tmp_path)))
    expected = CASES[name].expected
    np.testing.assert_allclose(logits(session, CASES[name], [12]), expected, rtol=0, atol=1e-4)
    if name == "phi3_long":
        return  # what is in the past keeps the frequencies of short texts
    np.testing.assert_allclose(
        logits(session, CASES[name], [6, 1, 1, 3, 1]), expected, rtol=0, atol=1e-4
    )


def test_graph_has_the_interface_of_exports_with_a_past(tmp_path: Path) -> None:
    model = ps.load(CASES["llama"].write(tmp_path))
    graph = model.graph
    pasts = [f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value")]
    presents = [f"present.{i}.{part}" for i in range(2) for part in ("key", "value")]
    assert [value.name for value in graph.inputs] == ["input_ids", "position_ids", *pasts]
    assert [value.name for value in graph.outputs] == ["logits", *presents]
    assert graph.inputs[0].shape == ("batch", "rows")
    assert graph.inputs[2].shape == ("batch", 2, "past", 8)
    assert model.output_dims["logits"] == ("batch", "rows", 40)
    assert model.output_dims["present.1.value"] == ("batch", 2, "total", 8)


def test_window_is_an_attribute_of_attention(tmp_path: Path) -> None:
    graph = ps.load(CASES["gemma2"].write(tmp_path)).graph
    attentions = [node for node in graph.nodes if node.op.name == "Attention"]
    assert [node.attrs.get("left_window_size") for node in attentions] == [4, None]
    assert [node.attrs["softcap"] for node in attentions] == [50, 50]


def test_origin_of_a_node_names_its_layer(tmp_path: Path) -> None:
    graph = ps.load(CASES["llama"].write(tmp_path / "tiny")).graph
    origins = {node.origin for node in graph.nodes}
    assert "layers.1.attention in tiny" in origins
