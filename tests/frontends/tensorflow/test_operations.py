"""The recorded operations of TensorFlow: each case is run by the tests of the module it belongs to."""

from __future__ import annotations

from pathlib import Path

from tests.support.tf_operations import CASES, owners

TESTS = Path(__file__).parents[2]


def test_every_case_is_run_by_the_test_file_of_its_module():
    assert owners().keys() == set(CASES.names)
    for owner in set(owners().values()):
        *folders, name = owner.split(".")
        text = TESTS.joinpath(*folders, f"test_{name}.py").read_text()
        assert "operation_tests(" in text and f'"{owner}"' in text, owner
