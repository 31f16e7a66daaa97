"""Random numbers and Dropout."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from penstock.core.types import INT64, ShapeError, TensorType
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.kernel import Kernel
from penstock.ops import find
from tests.ops.cases import f32, fails, float_type, infer, run
from tests.ops.harness import check_node, node_model, run_reference

DTYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


def compiled(name: str, inputs: list[Any], attrs: dict[str, Any], **options: Any) -> Kernel:
    (node,) = load_onnx(node_model(name, inputs, attrs, **options)).graph.nodes
    return node.op.compile(node, [TensorType(x.dtype, x.shape) for x in inputs])


@pytest.mark.parametrize("name", ["RandomNormal", "RandomUniform"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("like", [False, True])
def test_draws_are_distributed_and_reproducible(name: str, dtype: str, like: bool) -> None:
    normal = name == "RandomNormal"
    attrs: dict[str, Any] = {"mean": 3.0, "scale": 0.5} if normal else {"low": -1.0, "high": 3.0}
    attrs |= {"seed": 7.5, "dtype": int(DTYPES[dtype])}
    wide = np.zeros((400, 500), np.int32)
    if not like:
        attrs["shape"] = [400, 500]
    inputs = [wide] if like else []
    kernel = compiled(name + "Like" * like, inputs, attrs)
    first, second = kernel(*inputs), kernel(*inputs)
    assert first.dtype == getattr(ml_dtypes, dtype, dtype)
    assert first.shape == (400, 500)
    numbers = first.astype(np.float64)
    mean, deviation = (3.0, 0.5) if normal else (1.0, 4 / np.sqrt(12))
    assert abs(numbers.mean() - mean) < 0.02
    assert abs(numbers.std() - deviation) < 0.02
    if not normal:
        assert numbers.min() >= -1
        assert numbers.max() <= 3
    # A kernel goes on drawing; another of the same seed draws the same.
    assert (first != second).any()
    again = compiled(name + "Like" * like, inputs, attrs)
    np.testing.assert_array_equal(again(*inputs), first)
    assert kernel.into is not None
    for out in (np.empty_like(second), np.empty((400, 1000), second.dtype)[:, ::2]):
        another = compiled(name + "Like" * like, inputs, attrs)
        another(*inputs)
        assert another.into is not None
        another.into(*inputs, out)
        np.testing.assert_array_equal(out, second)
    other = compiled(name + "Like" * like, inputs, attrs | {"seed": 7.25})
    assert (other(*inputs) != first).any()


def test_without_a_seed_every_kernel_draws_its_own() -> None:
    a, b = (compiled("RandomNormal", [], {"shape": [8]})() for _ in range(2))
    assert (a != b).any()


def test_random_infers_its_types() -> None:
    assert infer("RandomNormal", [], {"shape": [2, 3], "dtype": 1}) == [float_type(2, 3)]
    assert infer("RandomUniformLike", [float_type("N", 3)]) == [float_type("N", 3)]
    kinds = infer("RandomNormalLike", [TensorType(INT64, ("N",))], {"dtype": 1})
    assert kinds == [float_type("N")]
    with pytest.raises(ShapeError):
        infer("RandomNormal", [], {"shape": [-1]})
    for name in ("RandomNormal", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"):
        op = find(name)
        assert op is not None
        assert not op.pure


def test_bernoulli_draws_with_its_probabilities() -> None:
    x = np.tile(np.array([0, 0.3, 1], np.float32), (50_000, 1))
    for dtype in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL):
        (y,) = run("Bernoulli", [x], {"seed": 1.0, "dtype": int(dtype)})
        share = y.astype(np.float64).mean(axis=0)
        assert share[0] == 0
        assert share[2] == 1
        assert abs(share[1] - 0.3) < 0.01
    (y,) = run("Bernoulli", [x.astype(ml_dtypes.bfloat16)])
    assert y.dtype == ml_dtypes.bfloat16
    kernel = compiled("Bernoulli", [x], {"seed": 1.0})
    out = np.empty((50_000, 3), np.float32)
    assert kernel.into is not None
    kernel.into(x, out)
    np.testing.assert_array_equal(out, compiled("Bernoulli", [x], {"seed": 1.0})(x))


def test_multinomial_draws_with_its_probabilities() -> None:
    shares = np.array([[0.1, 0.2, 0.7], [0.5, 0, 0.5]])
    with np.errstate(divide="ignore"):
        logits = np.log(shares).astype(np.float32) + 5
    attrs = {"sample_size": 20_000, "seed": 3.0, "dtype": int(TensorProto.INT64)}
    (y,) = run("Multinomial", [logits], attrs)
    assert y.shape == (2, 20_000)
    assert y.dtype == np.int64
    for row, want in zip(y, shares, strict=True):
        found = np.bincount(row, minlength=3) / 20_000
        np.testing.assert_allclose(found, want, atol=0.02)
        assert found[want == 0].sum() == 0
    (y,) = run("Multinomial", [logits.astype(np.float16)])
    assert y.dtype == np.int32
    assert y.shape == (2, 1)
    fails("Multinomial", [f32(3)], match="classes")
    (kind,) = infer("Multinomial", [float_type("N", 3)], {"sample_size": 4})
    assert kind == TensorType(np.dtype(np.int32), ("N", 4))


# Dropout

TRAINING, INFERENCE = np.array(True), np.array(False)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.75])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_in_training_scales_what_it_keeps(outputs: int, ratio: float, dtype: Any) -> None:
    inputs = [(f32(5, 6) + 1).astype(dtype), np.array(ratio, dtype), TRAINING]
    model = node_model("Dropout", inputs, {"seed": 5}, outputs=outputs, opset=13)
    wanted = run_reference(model, inputs)
    results = run("Dropout", inputs, {"seed": 5}, outputs=outputs)
    kernel = compiled("Dropout", inputs, {"seed": 5}, outputs=outputs)
    outs = [np.empty_like(x) for x in wanted]
    assert kernel.into is not None
    kernel.into(*inputs, *outs)
    for want, result, out in zip(wanted, results, outs, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6)
        np.testing.assert_array_equal(result, out)
        assert result.dtype == want.dtype
    if ratio:  # the next call draws anew
        again = kernel(*inputs)
        assert ((again[0] if outputs > 1 else again) != results[0]).any()


def test_dropout_in_inference_matches_the_reference() -> None:
    x = f32(3, 4)
    check_node("Dropout", [x])
    check_node("Dropout", [x, np.array(0.9, np.float32), INFERENCE], constants=(2,))
    check_node("Dropout", [x, np.array(0.9, np.float32), INFERENCE])
    check_node("Dropout", [x], outputs=2)
    half = x.astype(ml_dtypes.bfloat16)
    check_node(
        "Dropout", [half, None, INFERENCE], outputs=2, expected=[half, np.full((3, 4), True)]
    )
    (y,) = run("Dropout", [x])
    assert y is x


def test_dropout_of_edge_cases_matches_the_definition() -> None:
    x = f32(4) + 1
    half = x.astype(np.float16)
    attrs = {"seed": 1}
    (y,) = run("Dropout", [half, np.array(0.5, np.float32), TRAINING], attrs)
    assert y.dtype == np.float16
    brain = x.astype(ml_dtypes.bfloat16)
    (y,) = run("Dropout", [brain, np.array(0.5, np.float32), TRAINING], attrs)
    assert y.dtype == ml_dtypes.bfloat16
    assert set(y.astype(np.float32) / x) <= {0.0, 2.0}
    fails("Dropout", [x, np.array(1, np.float32), TRAINING], match="ratio")
    fails("Dropout", [x, np.array(0.5, np.float32), np.array([True, False])], match="scalar")
    infinite = np.array([np.inf, 1], np.float32)
    with np.errstate(invalid="ignore"):
        (y,) = run("Dropout", [infinite, np.array(0.5, np.float32), TRAINING], {"seed": 0})
    assert y.dtype == np.float32
    kinds = infer("Dropout", [float_type("N", 3)])
    assert kinds == [float_type("N", 3), TensorType(np.dtype(np.bool_), ("N", 3))]
