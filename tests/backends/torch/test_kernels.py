"""The kernels of the torch backend, on what flows through the official ONNX node cases, and on what
these have not."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.analysis.interpreter import evaluate
from penstock.frontends.onnx.importer import load_onnx
from tests.ops.harness import node_model
from tests.ops.test_official import compute_case, graphs, variants
from tests.support.torch_kernels import check_torch_kernel, needs_torch

pytestmark = needs_torch

rng = np.random.default_rng(11)


@pytest.mark.parametrize("name", graphs())
def test_torch_kernels_of_official_case_agree_with_numpy(name):
    def compute(node, given):
        with np.errstate(all="ignore"):
            results = evaluate(node, given)
        for variant in variants(node, given) if node.op.pure else ():
            for known in (True, False):
                check_torch_kernel(variant, given, results, known=known)
        return results

    compute_case(name, compute)


def floats(*dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def check(op: str, inputs, constants=(), outputs=1, opset=None, **attrs) -> None:
    """torch has a kernel for this node, and it does what NumPy's does."""
    version = {} if opset is None else {"opset": opset}
    (node,) = load_onnx(node_model(op, inputs, attrs, outputs=outputs, **version)).graph.nodes
    for i in constants:
        value = node.inputs[i]
        assert value is not None
        value.const = inputs[i]
    by_name = {f"x{i}": x for i, x in enumerate(inputs)}
    values = [None if v is None else by_name.get(v.name, v.const) for v in node.inputs]
    assert check_torch_kernel(node, values, evaluate(node, values))


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", GATES)
def test_torch_recurrent_layer_agrees_in_every_direction(cell, direction):
    d, rows = 1 + (direction == "bidirectional"), 5 * GATES[cell]
    inputs = [floats(6, 2, 3), floats(d, rows, 3), floats(d, rows, 5), floats(d, 2 * rows)]
    inputs += [None, floats(d, 2, 5)]
    attrs = {"direction": direction, "hidden_size": 5}
    if cell == "LSTM":
        inputs.append(floats(d, 2, 5))
    if cell == "GRU":
        attrs["linear_before_reset"] = 1
    check(cell, inputs, (1, 2, 3), 3 if cell == "LSTM" else 2, **attrs)


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"auto_pad": "SAME_UPPER"}])
def test_torch_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 9, 8), floats(6, 2, 3, 3), floats(6)]
    check("Conv", inputs, strides=[2, 1], group=2, **attrs)


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"output_padding": [1, 0]}])
def test_torch_transposed_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 5, 6), floats(4, 3, 3, 3), floats(6)]
    check("ConvTranspose", inputs, strides=[2, 2], group=2, **attrs)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_torch_pooling_agrees_with_different_padding_at_both_ends(op):
    attrs = {"count_include_pad": 1} if op == "AveragePool" else {}
    check(op, [floats(1, 2, 9, 8)], kernel_shape=[3, 2], pads=[1, 0, 0, 1], **attrs)


@pytest.mark.parametrize("axes", [[0], [-1], [0, 2], []])
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_torch_reduction_of_no_elements_gives_what_numpy_gives(op, axes):
    check(op, [np.zeros((2, 0, 3), np.float32), np.array(axes, np.int64)], (1,))


def test_torch_top_k_takes_the_first_of_equal_elements():
    x = np.array([[1, 3, 3, 2, 3, 1]], np.float32)
    check("TopK", [x, np.array([4], np.int64)], outputs=2)
    check("TopK", [x, np.array([4], np.int64)], outputs=2, largest=0)


@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
def test_torch_gather_counts_negative_indices_from_the_end(op):
    check(op, [floats(4, 3), np.array([[-1, 0, 2], [1, -3, 0]], np.int64)], axis=0)


def test_torch_layer_normalization_broadcasts_its_scale():
    check("LayerNormalization", [floats(2, 3, 4), floats(4), floats(3, 4)], axis=1)


def test_torch_attention_repeats_heads_of_keys_for_groups_of_queries():
    check("Attention", [floats(2, 4, 3, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 8)], is_causal=1)


@pytest.mark.parametrize("shift", [0.0, 90.0, -90.0])
def test_torch_softplus_is_exact_far_from_zero(shift):
    check("Softplus", [floats(3, 5) + np.float32(shift)])


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("widths", [[0, 0, 3, 0, 0, 2], [1, 2, 0, 0, 1, 3], [0] * 6])
def test_torch_pads_with_elements_of_the_tensor(mode, widths):
    check("Pad", [floats(2, 4, 5), np.array(widths)], constants=(1,), mode=mode)


def test_torch_slices_backward():
    numbers = [np.array(x) for x in ([-1, 0], [-(2**63) + 1, 4], [2, 1], [-2, 1])]
    check("Slice", [floats(2, 4, 5), *numbers], constants=(1, 2, 3, 4))
    whole = [np.array(x) for x in ([9], [-9], [0], [-1])]
    check("Slice", [floats(3, 2), *whole], constants=(1, 2, 3, 4))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_torch_softmax_before_opset_13_flattens_the_axes_from_one_on(op, axis):
    attrs = {} if axis is None else {"axis": axis}
    check(op, [floats(2, 3, 4)], opset=11, **attrs)
