"""Matrix products: MatMul, Gemm, Einsum, against NumPy's."""

from __future__ import annotations

from tests.support.torch_official import official_tests

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("products")
