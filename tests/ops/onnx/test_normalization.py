"""Normalizations by batch, instance, group, layer, channels and norms."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node
from tests.support.random_arrays import normal

rng = np.random.default_rng(0)
draw = partial(normal, rng)
NARROW = [np.float16, ml_dtypes.bfloat16]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LOOSE = {"rtol": 2e-2, "atol": 2e-2}
MS = {"expected": "ort", "domain": "com.microsoft", "opset": 1, **TOLERANCE}


def statistics(c, dtype=np.float32):
    return [draw(c, dtype=dtype), draw(c, dtype=dtype), draw(c, dtype=dtype),
            rng.uniform(0.5, 2, c).astype(dtype)]  # fmt: skip


# --- BatchNormalization ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 3, 2, 2, 2), (0, 3, 4, 4)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4)])
def test_batch_normalization_equals_the_definition(shape, epsilon, constants):
    inputs = [draw(*shape), *statistics(3)]
    check_node("BatchNormalization", inputs, {"epsilon": epsilon}, constants=constants, **TOLERANCE)


def test_batch_of_a_vector_has_one_channel():
    x, (a, b, mean, variance) = draw(5), statistics(1)
    want = (x - mean) / np.sqrt(variance + 1e-5) * a + b
    check_node("BatchNormalization", [x, a, b, mean, variance], expected=[want], **TOLERANCE)


@pytest.mark.parametrize("dtype", [np.float64, *NARROW])
@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4)])
def test_batch_normalization_computes_in_every_dtype(dtype, constants):
    for parameters in (statistics(3, dtype), statistics(3, np.float32)):
        x = draw(2, 3, 4, dtype=dtype)
        a, b, mean, variance = (p.astype(np.float64)[:, None] for p in parameters)
        want = (x.astype(np.float64) - mean) / np.sqrt(variance + 1e-5) * a + b
        check_node("BatchNormalization", [x, *parameters], expected=[want.astype(dtype)],
                   constants=constants, **LOOSE)  # fmt: skip


@pytest.mark.parametrize("momentum", [0.9, 0.25])
def test_batch_normalization_in_training_updates_its_statistics(momentum):
    inputs = [draw(2, 3, 4, 5), *statistics(3)]
    attrs = {"training_mode": 1, "momentum": momentum}
    check_node("BatchNormalization", inputs, attrs, outputs=3, **TOLERANCE)
    check_node(
        "BatchNormalization", inputs, attrs, outputs=3, expected="ort", opset=15, **TOLERANCE
    )


def test_batch_normalization_with_misfit_inputs_is_refused():
    with pytest.raises(ShapeError, match="scale has shape"):
        check_node("BatchNormalization", [draw(2, 4, 5), *statistics(3)], expected=[])
    with pytest.raises(ShapeError):
        check_node("BatchNormalization", [draw(), *statistics(1)], expected=[])
    with pytest.raises(ShapeError):
        check_node("BatchNormalization", [draw(2, 3, 5), *[draw(3, 1)] * 4], expected=[])
    with pytest.raises(ShapeError, match="has no elements to average"):
        check_node("BatchNormalization", [draw(0, 3, 5), *statistics(3)], {"training_mode": 1},
                   outputs=3, expected=[])  # fmt: skip


# --- InstanceNormalization and GroupNormalization -------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 4, 5, 6), (1, 4, 2, 3, 2), (0, 4, 3)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_instance_normalization_equals_the_definition(shape, epsilon):
    inputs = [draw(*shape), draw(4), draw(4)]
    if 0 in shape:
        check_node("InstanceNormalization", inputs, expected=[inputs[0]])
        return
    check_node("InstanceNormalization", inputs, {"epsilon": epsilon}, expected="ort", opset=21,
               **TOLERANCE)  # fmt: skip


def grouped(x, groups, scale, bias, epsilon=1e-5):
    parts = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    parts = parts - parts.mean(2, keepdims=True)
    parts = parts / np.sqrt((parts**2).mean(2, keepdims=True) + epsilon)
    each = x.shape[1] // len(scale)
    column = (-1, *(1,) * (x.ndim - 2))
    a, b = (np.repeat(p.astype(np.float64), each).reshape(column) for p in (scale, bias))
    return (parts.reshape(x.shape) * a + b).astype(x.dtype)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 4, 3)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_normalization_equals_the_definition(shape, groups):
    x = draw(*shape)
    scale, bias = draw(6), draw(6)
    want = grouped(x, groups, scale, bias, 0.01)
    attrs = {"num_groups": groups, "epsilon": 0.01}
    check_node("GroupNormalization", [x, scale, bias], attrs, expected=[want], **TOLERANCE)


@pytest.mark.parametrize("dtype", [np.float64, *NARROW])
def test_instance_and_group_of_every_dtype_matches_the_definition(dtype):
    x, scale, bias = draw(2, 4, 5, dtype=dtype), draw(4, dtype=dtype), draw(4, dtype=dtype)
    check_node("InstanceNormalization", [x, scale, bias], expected=[grouped(x, 4, scale, bias)],
               **LOOSE)  # fmt: skip
    check_node("GroupNormalization", [x, scale, bias], {"num_groups": 2}, opset=21,
               expected=[grouped(x, 2, scale, bias)], **LOOSE)  # fmt: skip


def test_instance_and_group_refuse():
    for op, shape, count, attrs in [
        ("InstanceNormalization", (2, 4), 4, {}),
        ("InstanceNormalization", (2, 4, 5), 3, {}),
        ("GroupNormalization", (2, 4, 5), 4, {"num_groups": 3}),
        ("GroupNormalization", (2, 4, 5), 4, {"num_groups": 0}),
        ("GroupNormalization", (2, 4, 5), 2, {"num_groups": 2}),
        ("GroupNormalization", (4,), 4, {"num_groups": 2}),
    ]:
        with pytest.raises(ShapeError):
            check_node(op, [draw(*shape), draw(count), draw(count)], attrs, expected=[])


# --- LayerNormalization and RMSNormalization ------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 3])
def test_layer_normalization_equals_the_definition(axis, bias, outputs):
    x = draw(3, 4, 5)
    scale = draw(*x.shape[axis:])
    inputs = [x, scale] + ([draw(*x.shape[axis:])] if bias else [])
    for attrs in ({"axis": axis}, {"axis": axis, "epsilon": 0.1}):
        check_node("LayerNormalization", inputs, attrs, outputs=outputs, expected="ort", opset=17,
                   **TOLERANCE)  # fmt: skip


def test_layer_with_parameters_that_broadcast():
    x = draw(3, 4, 5)
    d = x - x.mean((1, 2), keepdims=True)
    y = d / np.sqrt((d * d).mean((1, 2), keepdims=True) + 1e-5)
    for scale, bias in ((draw(5), draw(4, 1)), (draw(1), draw(3, 1, 1))):
        check_node("LayerNormalization", [x, scale, bias], {"axis": 1},
                   expected=[y * scale + bias], **TOLERANCE)  # fmt: skip


def test_layer_of_constant_rows_is_its_bias():
    x = np.repeat(np.arange(1, 4, dtype=np.float32), 7).reshape(3, 7)
    bias = draw(7)
    check_node("LayerNormalization", [x, np.ones(7, np.float32), bias], {"epsilon": 1e-12},
               expected=[np.tile(bias, (3, 1))], atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, *NARROW])
def test_layer_and_rms_of_every_dtype_matches_the_definition(dtype):
    x, scale, bias = draw(3, 8, dtype=dtype), draw(8, dtype=dtype), draw(8, dtype=dtype)
    wide = x.astype(np.float64)
    mean = wide.mean(1, keepdims=True)
    inverse = 1 / np.sqrt(((wide - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    y = (wide - mean) * inverse * scale.astype(float) + bias.astype(float)
    want = [y.astype(dtype), mean.astype(np.float32), inverse.astype(np.float32)]
    check_node("LayerNormalization", [x, scale, bias], expected=want, outputs=3, **LOOSE)
    rms = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * scale.astype(float)
    check_node("RMSNormalization", [x, scale], expected=[rms.astype(dtype)], **LOOSE)


def test_layer_saves_statistics_in_stash_type():
    x, scale = draw(3, 8, dtype=np.float16), draw(8, dtype=np.float16)
    outputs = check_node("LayerNormalization", [x, scale], {"stash_type": 16}, outputs=3, **LOOSE,
                         expected=_layer(x, scale, ml_dtypes.bfloat16))  # fmt: skip
    assert [y.dtype.name for y in outputs] == ["float16", "bfloat16", "bfloat16"]


def _layer(x, scale, stash):
    wide = x.astype(np.float64)
    mean = wide.mean(1, keepdims=True)
    inverse = 1 / np.sqrt(((wide - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    y = (wide - mean) * inverse * scale.astype(float)
    return [y.astype(x.dtype), mean.astype(stash), inverse.astype(stash)]


@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
def test_rms_normalization_equals_the_definition(axis):
    x = draw(3, 4, 5)
    check_node("RMSNormalization", [x, draw(*x.shape[axis:])], {"axis": axis}, **TOLERANCE)
    check_node("RMSNormalization", [x, draw(5)], {"axis": axis, "epsilon": 0.1}, **TOLERANCE)


def test_rms_of_mixed_of_every_dtype_matches_the_definition():
    x, scale = draw(3, 8, dtype=np.float16), draw(8)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * scale
    check_node("RMSNormalization", [x, scale], expected=[want.astype(np.float32)], **TOLERANCE)
    check_node("RMSNormalization", [wide, scale], expected=[want.astype(np.float32)], **TOLERANCE)


def test_simplified_layer_normalization_equals_rms_normalization():
    from penstock.core.types import type_of
    from penstock.ir.graph import Graph, Node, Value
    from penstock.ir.kernel import Kernel

    x, scale = draw(2, 3, 8), draw(8)
    values = [Value("x", type_of(x)), Value("scale", type_of(scale))]
    results = [Value("y"), Value("inverse")]
    node = Node(find("SimplifiedLayerNormalization"), values, results, {"epsilon": 1e-6})
    assert Graph(values, results, [node])
    kernel: Kernel = node.op.compile(node, [v.type for v in values])
    y, inverse = kernel(x, scale)
    want = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(inverse, want, rtol=1e-5)
    np.testing.assert_allclose(y, x * want * scale, rtol=1e-4, atol=1e-6)


def test_layer_and_rms_refuse():
    for op, shapes, attrs in [
        ("LayerNormalization", ((2, 3), (3,)), {"axis": 2}),
        ("LayerNormalization", ((2, 3), (2,)), {}),
        ("LayerNormalization", ((2, 3), (3,), (1, 2, 3)), {}),
        ("LayerNormalization", ((2, 3), (3,)), {"stash_type": 7}),
        ("RMSNormalization", ((2, 3), (4,)), {}),
        ("RMSNormalization", ((), (1,)), {}),
    ]:
        with pytest.raises(ShapeError):
            check_node(op, [draw(*s) for s in shapes], attrs, expected=[])


# --- The others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("attrs", [{}, {"alpha": 0.3, "beta": 0.5, "bias": 2.0}])
@pytest.mark.parametrize("shape", [(2, 7, 3, 4), (1, 1, 2, 2)])
def test_lrn_matches_the_reference(size, attrs, shape):
    x = draw(*shape)
    alpha, beta, bias = attrs.get("alpha", 1e-4), attrs.get("beta", 0.75), attrs.get("bias", 1.0)
    sums = np.empty_like(x)
    for c in range(shape[1]):
        low, high = max(0, c - (size - 1) // 2), c + size // 2 + 1
        sums[:, c] = (x[:, low:high] ** 2).sum(1)
    want = x / (bias + alpha / size * sums) ** beta
    check_node("LRN", [x], {"size": size, **attrs}, expected=[want], **TOLERANCE)
    if size % 2:
        check_node("LRN", [x], {"size": size, **attrs}, expected="ort", opset=21, **TOLERANCE)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_lp_normalization_equals_the_definition(p, axis):
    x = draw(3, 4, 5)
    x[:, 1] = x[1] = x[..., 1] = 0
    norm = np.linalg.norm(x, p, axis=axis, keepdims=True)
    want = np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)
    check_node("LpNormalization", [x], {"p": p, "axis": axis}, expected=[want], **TOLERANCE)


@pytest.mark.parametrize("axes", [None, [0, 1], [-1], [0, 1, 2, 3]])
def test_mean_variance_normalization_equals_the_definition(axes):
    attrs = {} if axes is None else {"axes": axes}
    check_node("MeanVarianceNormalization", [draw(2, 3, 4, 5)], attrs, **TOLERANCE)


@pytest.mark.parametrize("dtype", [np.float64, *NARROW])
def test_lrn_lp_and_mvn_of_every_dtype_matches_the_definition(dtype):
    x = draw(2, 3, 4, 5, dtype=dtype)
    wide = x.astype(np.float64)
    want = wide / (1 + 1e-4 / 1 * wide**2) ** 0.75
    check_node("LRN", [x], {"size": 1}, expected=[want.astype(dtype)], **LOOSE)
    want = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    check_node("LpNormalization", [x], expected=[want.astype(dtype)], **LOOSE)
    want = (wide - wide.mean((0, 2, 3), keepdims=True)) / wide.std((0, 2, 3), keepdims=True)
    check_node("MeanVarianceNormalization", [x], expected=[want.astype(dtype)], **LOOSE)


def test_lrn_lp_and_mvn_refuse_wrong_inputs():
    for op, shape, attrs in [
        ("LRN", (3,), {"size": 3}),
        ("LRN", (2, 3, 4, 4), {"size": 0}),
        ("LpNormalization", (2, 3), {"p": 3}),
        ("LpNormalization", (2, 3), {"axis": 2}),
        ("MeanVarianceNormalization", (2, 3), {}),
        ("MeanVarianceNormalization", (2, 3), {"axes": [1, -1]}),
    ]:
        with pytest.raises((ShapeError, PenstockError)):
            check_node(op, [draw(*shape)], attrs, expected=[draw(*shape)])


def test_normalization_infer_keeps_symbolic_dims():
    x = TensorType(FLOAT32, ("batch", "length", 64))
    vector = TensorType(FLOAT32, (64,))
    y, mean, inverse = find("LayerNormalization").infer([x, vector], {"axis": -1}, [None] * 2)
    assert y == x
    assert mean == inverse == TensorType(FLOAT32, ("batch", "length", 1))
    unknown = [TensorType(), TensorType(FLOAT32)]
    assert find("LayerNormalization").infer(unknown, {}, [None] * 2)[0] == TensorType(FLOAT32, None)
