"""Records of delimited fields."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_operations import CASES, operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.delimited"
)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("1,2", "has 2 fields, and 3 are wanted"),
        ("", "has 0 fields"),
        ("1,,x", "lacks field 1, which has no default"),
        ("1,x,y", "'x' is not a number"),
        ('1,2,a"b', "is not quoted"),
        ('1,2,"a', "has no end"),
        ('1,2,"a"b', "is not doubled"),
    ],
)
def test_records_that_tensorflow_refuses_are_refused(record: str, message: str) -> None:
    session = ps.compile(CASES.graph("DecodeCSV_quotes"))
    with pytest.raises(ps.RunError, match=message):
        session.run({"records:0": np.full(6, record, object)})
