"""TensorFlow's arithmetic as far as it is not ONNX's, with NumPy's broadcasting."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.math"
)
