"""Places of elements: slices, joins, gathers and shapes where TensorFlow's are not ONNX's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops.registry import TENSORFLOW, find
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.arrays"
)


@pytest.mark.parametrize("name", ["All", "Any"])
def test_truths_over_axes_that_are_no_integers_are_refused(name):
    types = [TensorType(np.dtype(bool), (3, 4)), TensorType(np.dtype(np.float32), (1,))]
    axes = np.zeros(1, np.float32)
    with pytest.raises(ShapeError, match="axes must be integers"):
        find(name, TENSORFLOW).infer(types, {}, [None, axes])


@pytest.mark.parametrize("name", ["All", "Any"])
def test_numbers_are_no_truths(name):
    """Passes express both by the extremes of their input."""
    types = [TensorType(np.dtype(np.float32), (3, 4)), TensorType(np.dtype(np.int32), (1,))]
    with pytest.raises(ShapeError, match="the input must be bool, not float32"):
        find(name, TENSORFLOW).infer(types, {}, [None, np.zeros(1, np.int32)])
