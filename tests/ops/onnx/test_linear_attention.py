"""LinearAttention, against the reference and in pieces."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

rng = np.random.default_rng(8)
B, T, D, E = 2, 5, 4, 3
RULES = ["linear", "gated", "delta", "gated_delta"]
FLOAT = np.dtype(np.float32)


def inputs(
    rule: str,
    heads: int = 4,
    kv_heads: int = 2,
    *,
    per_key: bool = False,
    shared: bool = False,
    past: bool = False,
    length: int = T,
) -> list[Any]:
    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return [
        normal(B, length, heads * D),
        normal(B, length, kv_heads * D) / 2,
        normal(B, length, kv_heads * E),
        normal(B, kv_heads, D, E) if past else None,
        -abs(normal(B, length, kv_heads * (D if per_key else 1))) if "gated" in rule else None,
        abs(normal(B, length, 1 if shared else kv_heads)) if "delta" in rule else None,
    ]


def check(values: list[Any], attrs: dict[str, Any], **more: Any) -> list[np.ndarray]:
    while values[-1] is None:
        values = values[:-1]
    more.setdefault("outputs", 2)
    more.setdefault("atol", 1e-5)
    return check_node("LinearAttention", values, attrs, rtol=1e-4, **more)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("past", [False, True])
def test_linear_attention_by_every_update_rule_equals_the_definition(
    rule: str, heads: tuple[int, int], per_key: bool, past: bool
) -> None:
    attrs = {"update_rule": rule, "q_num_heads": heads[0], "kv_num_heads": heads[1]}
    check(inputs(rule, *heads, per_key=per_key, past=past, shared=past), attrs)


@pytest.mark.parametrize("scale", [0.0, 0.3])
@pytest.mark.parametrize("length", [0, 1])
def test_linear_attention_with_scale_and_length_equals_the_definition(
    scale: float, length: int
) -> None:
    attrs = {"q_num_heads": 4, "kv_num_heads": 2, "scale": scale}
    check(inputs("gated_delta", past=True, length=length), attrs)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float16, 1e-2), (ml_dtypes.bfloat16, 5e-2)])
def test_linear_attention_of_every_dtype_equals_the_definition(dtype: Any, tol: float) -> None:
    attrs = {"q_num_heads": 4, "kv_num_heads": 2}
    values = [x.astype(dtype) for x in inputs("gated_delta", past=True)]
    wide = [x.astype(np.float32) for x in values]
    want = [y.astype(dtype) for y in check(wide, attrs)]
    check(values, attrs, expected=want, atol=tol)
    values[3] = values[3].astype(np.float32)  # states may be kept wider
    want[1] = check(wide, attrs)[1]
    check(values, attrs, expected=want, atol=tol)


@pytest.mark.parametrize(
    ("rule", "change", "attrs"),
    [
        ("gated_delta", {4: None}, {}),
        ("gated_delta", {5: None}, {}),
        ("linear", {4: (B, T, 2)}, {}),
        ("linear", {5: (B, T, 2)}, {}),
        ("linear", {0: (B, T, 17)}, {}),
        ("linear", {0: (B, T)}, {}),
        ("linear", {1: (B, T + 1, 8)}, {}),
        ("linear", {1: (B, T, 10)}, {}),
        ("linear", {2: (B, T, 5)}, {}),
        ("linear", {3: (B, 2, D, E + 1)}, {}),
        ("gated", {4: (B, T, 3)}, {}),
        ("delta", {5: (B, T, 3)}, {}),
        ("linear", {}, {"q_num_heads": 3}),
        ("linear", {}, {"kv_num_heads": 0}),
        ("linear", {}, {"update_rule": "quadratic"}),
    ],
)
def test_linear_attention_with_misfit_inputs_is_refused(
    rule: str, change: dict[int, Any], attrs: dict[str, Any]
) -> None:
    values = inputs(rule)
    for index, shape in change.items():
        values[index] = None if shape is None else np.zeros(shape, np.float32)
    attrs = {"update_rule": rule, "q_num_heads": 4, "kv_num_heads": 2, **attrs}
    with pytest.raises(ShapeError):
        check(values, attrs, expected=[None, None])


def test_linear_attention_infers_its_types() -> None:
    op = find("LinearAttention")
    assert op is not None
    attrs = {"update_rule": "linear", "q_num_heads": 4, "kv_num_heads": 2}
    q, k = TensorType(FLOAT, ("b", "t", 16)), TensorType(FLOAT, ("b", None, 8))
    v = TensorType(FLOAT, (None, None, 6))
    kinds = op.infer([q, k, v], attrs, [None] * 3)
    assert [kind.shape for kind in kinds] == [("b", "t", 12), ("b", 2, 4, 3)]
