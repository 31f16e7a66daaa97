"""Attention as one kernel of torch: ONNX's operation, and the chains that spell it out, against NumPy's."""

from __future__ import annotations

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("attention")


def test_torch_attention_repeats_heads_of_keys_for_groups_of_queries():
    check("Attention", [floats(2, 4, 3, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 8)], is_causal=1)
