"""Variables of a GraphDef and of sessions."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel, RunError
from penstock.frontends.common.diagnostics import Diagnostics
from penstock.frontends.tensorflow.function_library import FunctionLibrary
from penstock.frontends.tensorflow.importer import Importer
from penstock.frontends.tensorflow.scope import VariableFacts
from penstock.ops.tensorflow.state import Store
from tests.frontends.tensorflow.test_importer import refused
from tests.support.tf_graphs import Builder, Shape, Type


def counter() -> Builder:
    g = Builder()
    handle = {"dtype": Type("int32"), "shape": Shape(()), "shared_name": "v"}
    g.node("VarHandleOp", name="v", **handle)
    g.node("AssignVariableOp", "v", g.const(np.int32(10), "ten"), name="init", dtype=Type("int32"))
    g.node(
        "AssignAddVariableOp", "v", g.const(np.int32(1), "one"), name="bump", dtype=Type("int32")
    )
    g.node("ReadVariableOp", "v", "^bump", name="next", dtype=Type("int32"))
    g.node("ReadVariableOp", "v", name="now", dtype=Type("int32"))
    return g


def test_variables_belong_to_the_session() -> None:
    model = ps.load(counter().bytes())
    first, second = ps.compile(model), ps.compile(model)
    with pytest.raises(RunError, match="is read before it is initialized;"):
        first.run({}, ["now"])
    for session in (first, second):
        session.run({}, [], ["init"])
    for want in (11, 12, 13):
        assert first.run({}, ["next"])["next"] == want
    assert (first.run({}, ["now"])["now"], second.run({}, ["now"])["now"]) == (13, 10)
    read = first.run({}, ["now"])["now"]
    read[...] = 99
    assert first.run({}, ["now"])["now"] == 13


def test_references_to_variables_are_dereferenced() -> None:
    g = Builder()
    g.node("VariableV2", name="v", dtype=Type("float32"), shape=Shape((2,)))
    g.node(
        "Assign", "v", g.const(np.array([1, 2], np.float32), "c"), name="init", T=Type("float32")
    )
    g.node("AssignAdd", "v", g.const(np.ones(2, np.float32), "d"), name="more", T=Type("float32"))
    g.node("Identity", "v", name="read", T=Type("float32"))
    g.node("Mul", "v", "more", name="product", T=Type("float32"))
    session = ps.compile(g.bytes())
    np.testing.assert_array_equal(session.run({}, ["init"])["init"], [1, 2])
    np.testing.assert_array_equal(session.run({}, ["more"])["more"], [2, 3])
    np.testing.assert_array_equal(session.run({}, ["v", "read"])["v"], [2, 3])
    with pytest.raises(RunError, match=r"variable .v. has type"):
        session.run({"c": np.zeros(3, np.float32)}, [], ["init"])
    g.node("Assign", "read", "c", name="odd", T=Type("float32"))
    refused(g, "its input 0 must refer to a variable")


def test_frozen_variable_of_another_type_than_its_saved_value_is_refused() -> None:
    g = Builder()
    attrs = {"dtype": Type("float32"), "shape": Shape([3])}
    g.node("VarHandleOp", name="v", shared_name="v", **attrs)
    g.node("ReadVariableOp", "v", name="read", dtype=Type("float32"))
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(g.proto.library, diagnostics.where, diagnostics.limits)
    variables = VariableFacts(Store(), {"v": np.zeros(2, np.float32)})
    with pytest.raises(InvalidModel, match=r"float32\[3\], but float32\[2\] in the checkpoint"):
        Importer(g.proto.node, 0, library, diagnostics, variables).model(None)


def test_variable_of_another_type_than_its_saved_value_is_refused_when_it_is_imported() -> None:
    g = Builder()
    g.node("VarHandleOp", name="v", shared_name="w", dtype=Type("float32"), shape=Shape([3]))
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(g.proto.library, diagnostics.where, diagnostics.limits)
    store = Store({"w": np.zeros(3, np.int64)})
    with pytest.raises(InvalidModel, match="in the checkpoint"):
        Importer(g.proto.node, 0, library, diagnostics, VariableFacts(store, {})).model(None)
