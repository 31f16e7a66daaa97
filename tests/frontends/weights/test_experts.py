from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.artifact.tensor_file import load_arrays, save_arrays
from tests.frontends.weights.test_decoder import CASES, logits


def test_experts_of_a_layer_are_one_node(tmp_path: Path) -> None:
    graph = ps.load(CASES["qwen3_moe"].write(tmp_path)).graph
    mixtures = [node for node in graph.nodes if node.op.name == "MoE"]
    assert len(mixtures) == 2
    assert mixtures[0].attrs["normalize_routing_weights"] == 1
    assert [value.shape for value in mixtures[0].inputs[2::2] if value] == [
        *((4, 16, 24), (4, 24, 16), (4, 16, 24))
    ]


def test_experts_in_one_tensor_give_the_same(tmp_path: Path) -> None:
    case = CASES["qwen3_moe"]
    file = case.write(tmp_path) / "model.safetensors"
    weights, texts = load_arrays(file)
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts"
        of = {
            role: np.stack([weights.pop(f"{prefix}.{e}.{role}_proj.weight") for e in range(4)])
            for role in ("gate", "up", "down")
        }
        weights[f"{prefix}.gate_up_proj"] = np.concatenate((of["gate"], of["up"]), 1)
        weights[f"{prefix}.down_proj"] = of["down"]
    save_arrays(file, weights, texts)
    result = logits(ps.compile(ps.load(tmp_path)), case, [12])
    np.testing.assert_allclose(result, case.expected, rtol=0, atol=1e-4)


def test_activation_of_experts_other_than_silu_is_refused(tmp_path: Path) -> None:
    folder = CASES["qwen3_moe"].write(tmp_path)
    settings = CASES["qwen3_moe"].config | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ps.Unsupported, match="hidden_act 'gelu' of experts"):
        ps.load(folder)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    file = CASES["qwen3_moe"].write(tmp_path) / "model.safetensors"
    weights, texts = load_arrays(file)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_arrays(file, weights, texts)
    with pytest.raises(ps.InvalidModel, match=r"no tensor 'model\.layers\.1\.mlp\.experts\.2"):
        ps.load(tmp_path)
