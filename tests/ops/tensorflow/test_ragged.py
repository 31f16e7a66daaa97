"""Rows of different lengths, as dense tensors, n-grams and characters: a vector of all values, and splits, which say where each row begins and the last one ends."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.ragged"
)
