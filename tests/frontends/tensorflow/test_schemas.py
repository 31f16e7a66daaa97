"""The table of TensorFlow's operations."""

from __future__ import annotations

import pytest

from penstock.frontends.tensorflow import importer  # noqa: F401 - registers all rules
from penstock.frontends.tensorflow.conversion import RULES
from penstock.frontends.tensorflow.schemas import Argument, schemas


def test_every_rule_is_for_an_operation_with_a_schema() -> None:
    assert RULES.keys() <= schemas().keys()


def test_schema_has_lists_references_and_element_types() -> None:
    merge = schemas()["RefMerge"]
    assert merge.inputs == (Argument("inputs", "N", "T", ref=True),)
    assert merge.outputs == (Argument("output", ref=True), Argument("value_index", "", "int32"))
    assert len(merge.inputs_of({"N": 3})) == 3


def test_schema_has_defaults_of_attributes() -> None:
    pool = schemas()["MaxPool"]
    assert pool.defaults == {"data_format": "NHWC", "explicit_paddings": []}


def test_outputs_of_a_list_have_an_element_type_each() -> None:
    call = schemas()["PartitionedCall"]
    outputs = list(call.outputs_of({"Tout": ["float32", "int64"]}))
    assert [(argument.name, i, dtype) for argument, i, dtype in outputs] == [
        ("output", 0, "float32"),
        ("output", 1, "int64"),
    ]


@pytest.mark.parametrize("count", [None, -1, "3", 10**6])
def test_times_of_a_wrong_number_of_values_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="attribute 'N' is"):
        Argument("inputs", "N").times({"N": count})
