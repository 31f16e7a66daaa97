"""Quantization that is undone at once, and CTC's greedy decoder."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.quantization"
)
