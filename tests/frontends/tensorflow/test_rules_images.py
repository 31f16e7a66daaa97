"""Rules of operations on images: convolution, pooling, normalization, resizing, selection of boxes."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "frontends.tensorflow.rules_images"
)
