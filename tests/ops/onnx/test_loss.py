"""Losses, with targets in and out of range."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

rng = np.random.default_rng(2)
LOSSES = ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"]
FLOAT = np.dtype(np.float32)


def data(
    shape: tuple[int, ...], *, weighted: bool = False, dtype: Any = np.float32, ignore: Any = None
) -> list[Any]:
    samples = (shape[0], *shape[2:])
    target = rng.integers(0, shape[1], samples)
    if ignore is not None:
        target[rng.random(samples) < 0.3] = ignore
    inputs = [rng.normal(size=shape).astype(dtype), target]
    if weighted:
        inputs.append(rng.uniform(0.2, 2, shape[1]).astype(dtype))
    return inputs


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 4), (2, 4, 3, 2), (2, 3, 2, 1, 4)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [None, 2, -100, 77])
def test_losses_match_the_reference(
    name: str, shape: tuple[int, ...], reduction: str, weighted: bool, ignore: int | None
) -> None:
    attrs: dict[str, Any] = {"reduction": reduction}
    if ignore is not None:
        attrs["ignore_index"] = ignore
    inputs = data(shape, weighted=weighted, ignore=ignore)
    check_node(name, inputs, attrs)
    if name == "SoftmaxCrossEntropyLoss":
        check_node(name, inputs, attrs, outputs=2)
        check_node(name, inputs, attrs, outputs=2, expected="ort", opset=13)


def test_losses_ignore_targets_of_minus_one() -> None:
    """The mean is over the samples that count, whatever number marks the others."""
    x = np.log(np.full((4, 2), 0.5, np.float32))
    target = np.array([0, -1, 1, -1])
    want = np.array(np.log(2), np.float32)
    check_node(LOSSES[0], [x, target], {"ignore_index": -1}, expected=[want])
    check_node(LOSSES[1], [x, target], {"ignore_index": -1}, expected=[want])


def test_losses_ignore_targets_of_infinite_loss() -> None:
    x = np.array([[0, -np.inf], [np.log(0.5), np.log(0.5)]], np.float32)
    attrs = {"ignore_index": 1}
    check_node(LOSSES[0], [x, np.array([1, 0])], attrs, expected=[np.float32(np.log(2))])
    attrs["reduction"] = "none"
    want = np.array([0, np.log(2)], np.float32)
    check_node(LOSSES[0], [x, np.array([1, 0])], attrs, expected=[want])


def test_losses_with_all_targets_ignored_match_the_definition() -> None:
    inputs = [np.zeros((2, 3), np.float32), np.array([9, 9])]
    for name in LOSSES:
        check_node(name, inputs, {"ignore_index": 9}, expected=[np.array(np.nan, np.float32)])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_every_dtype_match_the_definition(name: str, dtype: Any, reduction: str) -> None:
    inputs = data((3, 5, 4), weighted=True, dtype=dtype)
    wide = [x.astype(np.float32) if i != 1 else x.astype(np.int32) for i, x in enumerate(inputs)]
    (want,) = check_node(name, wide, {"reduction": reduction})
    tolerance = 1e-6 if dtype == np.float64 else 1e-2
    check_node(
        name,
        inputs,
        {"reduction": reduction},
        expected=[want.astype(dtype)],
        rtol=tolerance,
        atol=tolerance,
    )


def test_cross_entropy_of_scores_far_apart_is_accurate() -> None:
    """The softmax of some vanishes; its logarithm does not."""
    x = np.array([[0, 1000.0, -1000.0]], np.float32)
    want = [np.float32(2000), np.array([[-1000, 0, -2000]], np.float32)]
    check_node(LOSSES[1], [x, np.array([2])], outputs=2, expected=want)


def test_losses_without_the_first_output_give_the_second() -> None:
    inputs = data((3, 4))
    _, log_prob = check_node(LOSSES[1], inputs, outputs=2)
    check_node(LOSSES[1], inputs, outputs=[False, True], expected=[log_prob])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_empty_batches_match_the_definition(name: str) -> None:
    inputs = [np.zeros((0, 3), np.float32), np.zeros(0, np.int64)]
    check_node(name, inputs, {"reduction": "none"}, expected=[np.zeros(0, np.float32)])
    check_node(name, inputs, {"reduction": "sum"}, expected=[np.float32(0)])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("x", "target", "weight", "attrs"),
    [
        ((3, 4), [0, 1, 4], None, {}),
        ((3, 4), [0, -1, 3], None, {}),
        ((3, 4), [0, -1, 3], None, {"ignore_index": -2}),
        ((3, 4), [0, 1], None, {}),
        ((3, 4), [[0, 1, 2]], None, {}),
        ((3, 4), [0, 1, 2], 3, {}),
        ((3,), [0, 1, 2], None, {}),
        ((3, 0), [0, 0, 0], None, {}),
        ((3, 4), [0, 1, 2], None, {"reduction": "median"}),
    ],
)
def test_losses_with_bad_inputs_are_refused(
    name: str, x: tuple[int, ...], target: Any, weight: int | None, attrs: dict[str, Any]
) -> None:
    inputs = [np.zeros(x, np.float32), np.array(target)]
    if weight is not None:
        inputs.append(np.ones(weight, np.float32))
    with pytest.raises(ShapeError if name == LOSSES[0] else PenstockError):
        check_node(name, inputs, attrs, expected=[None])


def test_losses_infer_their_types() -> None:
    op = find(LOSSES[0])
    assert op is not None
    x = TensorType(FLOAT, ("n", 10, None, 4))
    (kind,) = op.infer([x, TensorType()], {"reduction": "none"}, [None] * 2)
    assert kind == TensorType(FLOAT, ("n", None, 4))
    (kind,) = op.infer([TensorType(FLOAT), TensorType()], {}, [None] * 2)
    assert kind == TensorType(FLOAT, ())
