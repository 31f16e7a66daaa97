"""Conv and its relatives, in every strategy."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx import convolution as family
from tests.ops.harness import check_node, convolve, node_model, run_ort
from tests.support.random_arrays import normal

rng = np.random.default_rng(0)
draw = partial(normal, rng)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=["chosen", "shifted", "unfolded"])
def strategy(request, monkeypatch):
    """Every case in the strategy that is chosen for it, and in both that it could have."""
    if request.param != "chosen":
        pays = request.param == "shifted"
        monkeypatch.setattr(family, "_shifting_pays", lambda *_: pays)


def check_conv(x, w, attrs, bias=True, **options):
    inputs = [draw(*x), draw(*w)] + ([draw(w[0])] if bias else [])
    for constants in ((), range(1, len(inputs))):
        check_node("Conv", inputs, attrs, expected="ort", opset=21, constants=constants,
                   **TOLERANCE, **options)  # fmt: skip


GEOMETRY = [
    {},
    {"strides": [2, 3]},
    {"pads": [1, 1, 1, 1]},
    {"pads": [0, 2, 1, 3]},
    {"dilations": [2, 2]},
    {"strides": [2, 1], "pads": [2, 0, 1, 2], "dilations": [1, 2]},
    {"strides": [3, 3], "dilations": [2, 1], "pads": [3, 3, 3, 3]},
    {"auto_pad": "SAME_UPPER"},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 3], "dilations": [2, 1]},
    {"auto_pad": "VALID", "strides": [2, 2]},
    {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1]},
]


@pytest.mark.parametrize("attrs", GEOMETRY)
@pytest.mark.parametrize(
    "x, w, group",
    [
        ((1, 3, 9, 11), (4, 3, 3, 2), 1),
        ((2, 4, 9, 11), (6, 2, 3, 2), 2),
        ((2, 3, 9, 11), (3, 1, 3, 2), 3),
        ((2, 3, 9, 11), (6, 1, 3, 2), 3),
        ((2, 3, 9, 11), (12, 1, 3, 2), 3),
        ((1, 1, 9, 11), (2, 1, 3, 2), 1),
    ],
)
def test_conv_2d_matches_the_reference(strategy, x, w, group, attrs):
    if "dilations" in attrs and "SAME" in attrs.get("auto_pad", ""):
        pytest.skip("ONNX Runtime refuses SAME with dilations")
    check_conv(x, w, {**attrs, "group": group})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "x, w, attrs",
    [
        ((2, 3, 20), (4, 3, 5), {"pads": [4, 0], "dilations": [2]}),
        ((2, 4, 20), (4, 1, 5), {"group": 4, "strides": [3], "pads": [2, 2]}),
        ((1, 3, 20), (4, 3, 1), {}),
        ((2, 4, 20), (6, 2, 1), {"group": 2}),
        ((1, 3, 20), (4, 3, 1), {"strides": [2]}),
        ((1, 3, 20), (4, 3, 1), {"pads": [1, 2]}),
        ((2, 2, 6, 7, 5), (3, 2, 3, 2, 2), {"pads": [1, 1, 1, 0, 1, 1], "strides": [2, 1, 2]}),
        ((2, 4, 6, 7, 5), (4, 1, 3, 2, 2), {"group": 4, "pads": [1] * 6, "strides": [2, 1, 2]}),
        ((1, 2, 6, 7, 5), (3, 2, 1, 1, 1), {}),
        ((0, 3, 5, 5), (4, 3, 3, 3), {}),
        ((2, 3, 5, 5), (4, 3, 7, 7), {"pads": [3, 3, 3, 3]}),
        ((1, 2, 3, 3), (2, 2, 2, 2), {"pads": [4, 4, 4, 4]}),
        ((1, 2, 3, 3), (2, 1, 2, 2), {"pads": [4, 4, 4, 4], "group": 2}),
        ((1, 2, 3, 3), (2, 1, 1, 1), {"strides": [7, 7], "group": 2}),
        ((2, 70, 4, 5), (70, 1, 3, 3), {"group": 70, "pads": [1, 1, 1, 1]}),
        ((1, 70, 8, 9), (140, 1, 3, 3), {"group": 70, "pads": [1, 0, 1, 1], "strides": [2, 2]}),
    ],
)
def test_conv_ranks_and_of_edge_cases_matches_the_definition(strategy, x, w, attrs, bias):
    if x[0] == 0:
        y = np.zeros((0, 4, 3, 3), np.float32)
        check_node("Conv", [draw(*x), draw(*w)], attrs, expected=[y])
        return
    check_conv(x, w, attrs, bias)


@pytest.mark.parametrize("block", [1, 600, 5000])
@pytest.mark.parametrize(
    "x, w, attrs",
    [
        ((2, 3, 9, 11), (4, 3, 3, 2), {"pads": [1, 2, 1, 0], "strides": [2, 1]}),
        ((1, 2, 6, 7, 5), (3, 2, 3, 2, 2), {"pads": [1, 1, 1, 0, 1, 1]}),
        ((2, 4, 9, 11), (6, 2, 3, 2), {"group": 2}),
        ((2, 6, 9, 11), (6, 1, 3, 2), {"group": 6, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ((1, 3, 300), (4, 3, 3), {}),
    ],
)
def test_conv_in_blocks_matches_the_whole(monkeypatch, strategy, x, w, attrs, block):
    monkeypatch.setattr(family, "BLOCK_BYTES", block)
    monkeypatch.setattr(family, "MIN_BLOCK", 7)
    check_conv(x, w, attrs)


@pytest.mark.parametrize("counts", [(5,), (3, 4), (2, 3, 4), (1, 1, 7)])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 100])
def test_boxes_cover_in_order(counts, limit):
    grid = np.arange(np.prod(counts)).reshape(counts)
    parts = [grid[tuple(slice(*r) for r in box)] for box in family.boxes(counts, limit)]
    assert np.concatenate([p.reshape(-1) for p in parts]).tolist() == grid.reshape(-1).tolist()
    assert all(p.size <= limit for p in parts)


def test_conv_takes_strided_inputs(strategy):
    x = draw(2, 9, 11, 8).transpose(0, 3, 1, 2)[:, ::2]
    for w, group in ((draw(4, 4, 3, 3), 1), (draw(4, 1, 3, 3), 4), (draw(5, 4, 1, 1), 1)):
        want = convolve(np.ascontiguousarray(x), w, {"group": group})
        np.testing.assert_array_equal(convolve(x, w, {"group": group}), want)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("w", [(4, 4, 3, 3), (4, 1, 3, 3), (4, 4, 1, 1)])
def test_conv_of_every_dtype_matches_the_definition(strategy, dtype, w):
    group = 4 // w[1]
    inputs = [draw(2, 4, 6, 6, dtype=dtype), draw(*w, dtype=dtype), draw(4, dtype=dtype)]
    wide = [x.astype(np.float64) for x in inputs]
    want = convolve(wide[0], wide[1], {"group": group, "pads": [1] * 4})
    want = (want + wide[2][:, None, None]).astype(dtype)
    rtol = 1e-6 if dtype == np.float64 else 0.02
    for constants in ((), (1, 2)):
        check_node("Conv", inputs, {"group": group, "pads": [1] * 4}, expected=[want],
                   rtol=rtol, atol=rtol, constants=constants)  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 4])
def test_convolution_strategies_on_integers_are_exact(strategy, group):
    x = rng.integers(-128, 128, (2, 4, 7, 7)).astype(np.int32)
    w = rng.integers(-128, 128, (4, 4 // group, 3, 3)).astype(np.int32)
    attrs = {"group": group, "pads": [1, 1, 1, 1], "strides": [2, 2]}
    want = convolve(x.astype(np.float64), w.astype(np.float64), attrs)
    np.testing.assert_array_equal(convolve(x, w, attrs), want)


@pytest.mark.parametrize(
    "x, w, attrs",
    [
        ((1, 3, 5, 5), (4, 2, 3, 3), {}),
        ((1, 3, 5, 5), (4, 3, 3), {}),
        ((1, 3), (4, 3), {}),
        ((1, 4, 5, 5), (3, 2, 3, 3), {"group": 2}),
        ((1, 3, 5, 5), (4, 1, 3, 3), {"group": 0}),
        ((1, 3, 5, 5), (4, 3, 7, 3), {}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"strides": [1]}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"strides": [0, 1]}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"dilations": [1, -1]}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"pads": [1, 1, 1]}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"pads": [-1, 1, 1, 1]}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"auto_pad": "SOME"}),
        ((1, 3, 5, 5), (4, 3, 3, 3), {"kernel_shape": [3, 2]}),
        ((1, 3, 5, 5), (4, 3, 0, 3), {}),
        ((1, 3, 0, 5), (4, 3, 3, 3), {}),
    ],
)
def test_conv_with_bad_inputs_is_refused(x, w, attrs):
    with pytest.raises(ShapeError):
        check_node("Conv", [draw(*x), draw(*w)], attrs, expected=[])


def test_conv_refuses_a_bias_of_another_size():
    with pytest.raises(ShapeError, match="bias has shape"):
        check_node("Conv", [draw(1, 3, 5, 5), draw(4, 3, 3, 3), draw(3)], expected=[])


def test_infer_conv_keeps_what_is_known():
    infer = find("Conv").infer

    def shape(x, w, **attrs):
        types = [TensorType(FLOAT32, x), TensorType(FLOAT32, w)]
        return infer(types, attrs, [None, None])[0].shape

    assert shape(("n", 3, "h", 32), (8, 3, 3, 3), pads=[1] * 4) == ("n", 8, "h", 32)
    assert shape(("n", 3, "h", 32), (8, 3, 3, 3)) == ("n", 8, None, 30)
    assert shape(("n", 3, "h", "w"), (8, 3, 3, 3), auto_pad="SAME_UPPER") == ("n", 8, "h", "w")
    assert shape((1, 3, 9, "w"), (8, 3, None, None), auto_pad="SAME_UPPER", strides=[2, 2]) == (
        1, 8, 5, None,
    )  # fmt: skip
    assert shape(None, (8, 3, 3, 3)) == (None, 8, None, None)
    assert shape(("n", 3, 9, 9), None) == ("n", None, None, None)
    assert shape(("n", 3, 9, 9), None, kernel_shape=[3, 3]) == ("n", None, 7, 7)
    assert shape(None, None) is None


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("kernel", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("past", [True, False])
def test_causal_conv_matches_the_reference(activation, length, kernel, bias, past):
    inputs = [
        draw(2, 3, length),
        draw(3, 1, kernel),
        draw(3) if bias else None,
        draw(2, 3, kernel - 1) if past else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    check_node("CausalConvWithState", inputs, {"activation": activation}, outputs=2)
    check_node("CausalConvWithState", inputs, outputs=2, constants=[1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_causal_conv_narrow_matches_the_reference(dtype):
    x, w = draw(2, 3, 9, dtype=dtype), draw(3, 1, 4, dtype=dtype)
    padded = np.concatenate([np.zeros((2, 3, 3), dtype), x], axis=2)
    want = sum(padded[:, :, i : i + 9].astype(float) * w[:, :, i].astype(float) for i in range(4))
    check_node("CausalConvWithState", [x, w], outputs=2, rtol=0.02, atol=0.02,
               expected=[want.astype(dtype), padded[:, :, 9:]])  # fmt: skip


@pytest.mark.parametrize(
    "shapes, attrs",
    [
        (((2, 3), (3, 1, 4)), {}),
        (((2, 3, 5), (4, 1, 4)), {}),
        (((2, 3, 5), (3, 2, 4)), {}),
        (((2, 3, 5), (3, 1, 0)), {}),
        (((2, 3, 5), (3, 1, 4), (4,)), {}),
        (((2, 3, 5), (3, 1, 4), (3,), (2, 3, 4)), {}),
        (((2, 3, 5), (3, 1, 4)), {"activation": "relu"}),
    ],
)
def test_causal_conv_with_bad_inputs_is_refused(shapes, attrs):
    with pytest.raises(ShapeError):
        check_node("CausalConvWithState", [draw(*s) for s in shapes], attrs, expected=[], outputs=2)


def test_convolution_workspaces_are_bounded():
    for x, w, group in [
        ((1, 64, 224, 224), (64, 64, 3, 3), 1),
        ((1, 32, 112, 112), (32, 1, 3, 3), 32),
        ((1, 96, 112, 112), (24, 96, 3, 3), 1),
        ((1, 672, 14, 14), (672, 1, 5, 5), 672),
        ((8, 64, 56, 56), (64, 64, 1, 1), 1),
    ]:
        kinds = TensorType(FLOAT32, x), TensorType(FLOAT32, w)
        routine = family.convolution_routine(*kinds, {"group": group, "pads": [w[2] // 2] * 4})
        assert routine.workspace <= 2.1 * family.BLOCK_BYTES


def test_agrees_with_its_peer_on_a_real_layer():
    x, w = draw(1, 32, 56, 56), draw(64, 32, 3, 3)
    attrs = {"pads": [1, 1, 1, 1]}
    (want,) = run_ort(node_model("Conv", [x, w], attrs, opset=21), [x, w])
    np.testing.assert_allclose(convolve(x, w, attrs), want, rtol=1e-3, atol=1e-3)


def test_one_filter_seen_many_times_is_computed_once(strategy):
    x = draw(2, 3, 6, 5)
    weights = np.broadcast_to(draw(3, 2, 3), (7, 3, 2, 3))
    bias = np.zeros(7, np.float32)
    for inputs, constants in (([x, weights], (1,)), ([x, weights, bias], (1, 2))):
        (y,) = check_node("Conv", inputs, {"pads": [1, 0, 0, 2]}, expected="ort", opset=21,
                          constants=constants, **TOLERANCE)  # fmt: skip
        assert (y == y[:, :1]).all()
