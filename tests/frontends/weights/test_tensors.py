from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.limits import Limits
from penstock.frontends.common.weight_file import ConstantBudget, WeightFile
from penstock.frontends.weights.tensors import StoredTensor, TensorStore


def store(*names: str, kind: str = "F32", limits: Limits | None = None) -> TensorStore:
    data = np.arange(6, dtype=np.float32).tobytes()
    tensors = {
        name: StoredTensor(name, (2, 3), kind, "m.gguf", WeightFile(data), 0, 24) for name in names
    }
    return TensorStore("m.gguf", tensors, ConstantBudget(limits or Limits()))


def test_tensor_is_a_read_only_view() -> None:
    array = store("a").get("a", (2, 3)).array()
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    assert not array.flags.writeable


def test_tensor_that_is_not_aligned_is_copied() -> None:
    data = b"\0" + np.arange(6, dtype=np.float32).tobytes()
    tensor = StoredTensor("a", (2, 3), "F32", "m.gguf", WeightFile(data), 1, 24)
    assert tensor.array().flags.aligned
    np.testing.assert_array_equal(tensor.array(), [[0, 1, 2], [3, 4, 5]])


def test_missing_tensor_and_other_shape_are_named() -> None:
    tensors = store("a")
    with pytest.raises(ps.InvalidModel, match=r"m\.gguf has no tensor 'b'"):
        tensors.get("b", (2, 3))
    with pytest.raises(ps.InvalidModel, match=r"'a' of m\.gguf has shape \[2, 3\]"):
        tensors.get("a", (3, 2))


def test_tensor_of_another_type_is_unsupported() -> None:
    with pytest.raises(ps.Unsupported, match=r"type IQ4_NL.*F32, F16"):
        store("a", kind="IQ4_NL").get("a", (2, 3))


def test_constants_are_counted_once_against_the_limit() -> None:
    tensors = store("a", "b", limits=Limits(max_constant_bytes=40))
    tensors.get("a", (2, 3))
    tensors.get("a", (2, 3))
    with pytest.raises(ps.InvalidModel, match="max_constant_bytes"):
        tensors.get("b", (2, 3))


def test_parameters_that_are_not_read_are_refused_but_buffers_are_not() -> None:
    tensors = store("a", "model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.masked_bias")
    tensors.get("a", (2, 3))
    tensors.check_all_read()
    tensors = store("a", "b", "c")
    tensors.get("a", (2, 3))
    with pytest.raises(ps.Unsupported, match="a tensor 'b' and 1 others"):
        tensors.check_all_read()
