"""ONNX's Attention becomes Penstock's own, or the operations that it consists of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.compiler.options import EXECUTORS
from penstock.core.types import Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import Workload
from tests.support.onnx_text import model_from_text

rng = np.random.default_rng(23)


def text_of(
    shapes: tuple[str, str, str],
    attrs: str = "",
    mask: str = "",
    dtype: str = "float",
    outputs: str = "y",
) -> str:
    fed = [f"{dtype}[{shape}] {name}" for shape, name in zip(shapes, "qkv", strict=True)]
    names = "q, k, v" + (", m" if mask else "")
    declared = [f"{dtype} {name}" for name in outputs.replace(" ", "").split(",") if name]
    return (
        f"g ({', '.join([*fed, *([mask] if mask else [])])}) => ({', '.join(declared)})"
        f" {{ {outputs} = Attention {f'<{attrs}>' if attrs else ''}({names}) }}"
    )


def feeds_of(model) -> dict[str, np.ndarray]:
    feeds = {}
    for port in model.graph.input:
        dims = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        kind = port.type.tensor_type.elem_type
        x = rng.standard_normal(dims)
        dtypes = {1: np.float32, 10: np.float16, 11: np.float64}
        feeds[port.name] = x > -0.3 if kind == 9 else x.astype(dtypes[kind])
    return feeds


def operations(session: ps.Session) -> set[str]:
    return {name for step in session.inspect.plan.walk() for name in _names(step.node)}


def _names(node) -> list[str]:
    return [part.op.full_name for part in parts(node)]


FOUR = ("2, 4, 5, 8", "2, 4, 7, 8", "2, 4, 7, 6")
GROUPED = ("2, 4, 5, 8", "2, 2, 7, 8", "2, 2, 7, 6")
THREE = ("2, 5, 32", "2, 7, 16", "2, 7, 12")
HEADS = "q_num_heads=4, kv_num_heads=2"

CASES = {
    "plain": text_of(FOUR),
    "scale": text_of(FOUR, "scale=0.3"),
    "softcap": text_of(FOUR, "softcap=1.5"),
    "causal": text_of(FOUR, "is_causal=1"),
    "grouped": text_of(GROUPED),
    "grouped causal": text_of(GROUPED, "is_causal=1"),
    "features": text_of(THREE, HEADS),
    "present": text_of(THREE, HEADS, outputs="y, pk, pv"),
    "flags": text_of(FOUR, mask="bool[5, 7] m"),
    "flags of samples": text_of(GROUPED, mask="bool[2, 1, 5, 7] m"),
    "flags of heads": text_of(GROUPED, mask="bool[4, 5, 7] m"),
    "numbers": text_of(FOUR, mask="float[2, 4, 5, 7] m"),
    "numbers and causal": text_of(THREE, f"{HEADS}, is_causal=1", mask="float[5, 7] m"),
    "flags and softcap": text_of(THREE, f"{HEADS}, softcap=2.0", mask="bool[5, 7] m"),
}
KEPT = {
    "float64": text_of(FOUR, dtype="double"),
    "scores": text_of(FOUR, outputs="y, , , s"),
    "wide softmax": text_of(FOUR, "softmax_precision=11"),
    "narrow mask": text_of(FOUR, mask="bool[5, 6] m"),
    "nothing": text_of(("2, 4, 0, 8", *FOUR[1:])),
}


OWN = "penstock.Attention"


class WithoutAttention(NativeBackend):
    """All compiled kernels but those of attention."""

    def work(self, node: Node) -> Workload | None:
        return None if node.op.full_name == OWN else super().work(node)

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return None if node.op.full_name == OWN else super().kernel(node, types)


BACKENDS = {"default": lambda: None, "steps": lambda: [WithoutAttention(), "numpy"]}


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_attention_of_known_shapes_is_one_step_or_products_and_equals_the_definition(
    case, backends
):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = model_from_text(CASES[case], opset=23)
    feeds = feeds_of(model)
    session = ps.compile(model, backends=BACKENDS[backends]())
    outputs = session.run(feeds)
    assert "Attention" not in operations(session)
    assert (OWN in operations(session)) == (backends == "default")
    assert ("Softmax" in operations(session)) == (backends != "default")
    wanted = ps.compile(model, backends=["numpy"]).run(feeds)
    theirs = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for (name, y), other in zip(outputs.items(), theirs, strict=True):
        np.testing.assert_allclose(y, wanted[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(y, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", KEPT)
def test_attention_of_other_forms_is_left_as_it_is(case):
    model = model_from_text(KEPT[case], opset=23)
    feeds = feeds_of(model)
    session = ps.compile(model)
    outputs = session.run(feeds)
    assert "Attention" in operations(session) or not outputs["y"].size
    wanted = ps.compile(model, backends=["numpy"]).run(feeds)
    for name, y in outputs.items():
        np.testing.assert_allclose(y, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("attrs", ["", "is_causal=1"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shapes", [FOUR, GROUPED])
def test_query_that_sees_no_key_gets_zeros_and_nan_stays_nan(shapes, kind, attrs, backends):
    model = model_from_text(text_of(shapes, attrs, f"{kind}[5, 7] m"), opset=23)
    feeds = feeds_of(model)
    seen = np.ones((5, 7), bool)
    seen[2] = False
    feeds["m"] = seen if kind == "bool" else np.where(seen, 0, -np.inf).astype(np.float32)
    feeds["q"][0, 0, 1] = np.nan
    session = ps.compile(model, backends=BACKENDS[backends]())
    y = session.run(feeds)["y"]
    assert "Attention" not in operations(session)
    assert not y[:, :, 2].any()
    assert np.isnan(y[0, 0, 1]).all() and not np.isnan(y[1]).any()
    wanted = ps.compile(model, backends=["numpy"]).run(feeds)["y"]
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "window", ["left_window_size=1", "right_window_size=0, left_window_size=2"]
)
def test_windows_are_a_constant_and_queries_beyond_all_keys_get_zeros(window):
    shapes = ("1, 2, 9, 8", "1, 2, 4, 8", "1, 2, 4, 8")
    model = model_from_text(text_of(shapes, window), opset=25)
    feeds = feeds_of(model)
    session = ps.compile(model)
    y = session.run(feeds)["y"]
    assert "Attention" not in operations(session)
    assert not y[:, :, 8].any()
    wanted = ps.compile(model, backends=["numpy"]).run(feeds)["y"]
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_long_attention_is_one_step():
    shapes = ("1, 4, 512, 32",) * 3
    model = model_from_text(text_of(shapes, "is_causal=1"), opset=23)
    feeds = feeds_of(model)
    session = ps.compile(model)
    y = session.run(feeds)["y"]
    assert [(step.backend, _names(step.node)) for step in session.inspect.plan.walk()] == [
        ("native", [OWN])
    ]
    wanted = ps.compile(model, backends=["numpy"]).run(feeds)["y"]
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_mask_that_does_not_fit_is_an_error_that_names_the_node(executor):
    text = text_of(FOUR, mask="float[a, b] m")
    model = model_from_text(text, opset=23)
    feeds = feeds_of(model_from_text(text_of(FOUR), opset=23))
    session = ps.compile(model, executor=executor)
    for shape in ((5, 8), (4, 7), (3, 1)):
        with pytest.raises(
            (ps.InvalidInput, ps.RunError), match=r"attn_mask of shape .* does not broadcast"
        ) as info:
            session.run(feeds | {"m": np.zeros(shape, np.float32)})
        assert "Attention" in str(info.value)
    assert session.run(feeds | {"m": np.zeros((5, 7), np.float32)})["y"].shape == (2, 4, 5, 6)
