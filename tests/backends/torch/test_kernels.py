"""The kernels of the torch backend: each official ONNX node case is run by the tests of a module."""

from __future__ import annotations

from pathlib import Path

from tests.ops.test_official import graphs
from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import official_tests, owners

pytestmark = needs_torch

test_official_cases_without_kernel_of_torch_are_computed_by_the_others = official_tests("")


def test_every_official_case_is_run_by_the_test_file_of_its_module():
    assert owners().keys() == graphs().keys()
    for owner in set(owners().values()) - {""}:
        text = Path(__file__).with_name(f"test_{owner}.py").read_text()
        assert f'official_tests("{owner}")' in text, owner
