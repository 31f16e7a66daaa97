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
    expected = {"T": "float32", "data_format": "NHWC", "explicit_paddings": []}
    assert pool.defaults == expected


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("T", "float32"), ("ksize", [1, 2, 2, 1]), ("explicit_paddings", []), ("padding", "SAME")],
)
def test_attribute_of_its_type_is_accepted(name: str, value: object) -> None:
    attribute = schemas()["MaxPool"].attributes[name]
    attribute.check(value)
    with pytest.raises(ValueError, match="of another type"):
        attribute.check([[value]])


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("T", "string", "not one of"),
        ("T", 1, "of another type"),
        ("ksize", 2, "of another type"),
        ("ksize", [1, 2.0], "of another type"),
        ("padding", "FULL", "not one of EXPLICIT, SAME, VALID"),
        ("padding", ["SAME"], "of another type"),
    ],
)
def test_attribute_of_another_type_or_value_is_refused(
    name: str, value: object, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        schemas()["MaxPool"].attributes[name].check(value)


def test_bool_is_no_int() -> None:
    with pytest.raises(ValueError, match="of another type"):
        schemas()["Pack"].attributes["axis"].check(True)


def test_required_attributes_say_how_many_values_of_what_type_there_are() -> None:
    assert schemas()["AddN"].required == ["N", "T"]
    assert schemas()["Cast"].required == ["DstT", "SrcT"]
    assert schemas()["Range"].required == []
    assert schemas()["LogicalNot"].required == []
