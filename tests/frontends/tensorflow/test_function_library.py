"""Functions of a graph: calls that become bodies, and those that cannot."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.frontends.common.diagnostics import Diagnostics
from penstock.frontends.tensorflow.function_library import FunctionLibrary
from penstock.frontends.tensorflow.importer import Importer
from tests.frontends.tensorflow.test_importer import refused
from tests.support.tf_graphs import Builder, Func, Type


def calling(op: str, **attrs: object) -> Builder:
    g = Builder()
    g.function("F", {"x": "int32"}, {"y": "int32"}, {"y": "z:z:0"})
    g.const(np.int32(1), "one")
    g.node("AddV2", "x", "one:output:0", name="z", T=Type("int32"))
    g.main()
    g.placeholder("x", "int32")
    g.node(op, "x", name="call", **attrs)
    return g


INT32S = {"Tin": [Type("int32")], "Tout": [Type("int32")]}


def test_function_call_becomes_the_body() -> None:
    session = ps.compile(calling("PartitionedCall", f=Func("F"), **INT32S).bytes())
    assert session.run({"x": 4}, ["call"])["call"] == 5
    assert ps.compile(calling("F").bytes()).run({"x": 4}, ["call"])["call"] == 5


def test_call_of_a_missing_function_is_refused() -> None:
    refused(calling("PartitionedCall", f=Func("G"), **INT32S), "names a function 'G'")
    refused(calling("PartitionedCall", **INT32S), "has no function as its attribute 'f'")
    two = {"Tin": [Type("int32")], "Tout": [Type("int32"), Type("int32")]}
    refused(calling("PartitionedCall", f=Func("F"), **two), "2 outputs, but its function gives 1")


def test_recursive_function_stays_a_function() -> None:
    g = calling("PartitionedCall", f=Func("F"), **INT32S)
    g.into = g.proto.library.function[0].node_def
    g.node("PartitionedCall", "z:z:0", name="again", f=Func("F"), **INT32S)
    g.proto.library.function[0].ret["y"] = "again:output:0"
    model = ps.load(g.bytes())
    assert set(model.functions) == {"F"}
    calls = [node for node in model.functions["F"].nodes if node.op.name == "Call"]
    assert [node.attrs["function"] for node in calls] == ["F"]
    with pytest.raises(Unsupported, match=r"tensorflow\.Call"):
        ps.compile(model, executor="linear").run({"x": 1}, ["call"])


def test_exponential_expansion_is_refused() -> None:
    g = Builder()
    for i in range(60):
        g.function(f"F{i}", {"x": "int32"}, {"y": "int32"}, {"y": "b:output:0"})
        for name, source in (("a", "x"), ("b", "a:output:0")):
            if i:
                g.node("PartitionedCall", source, name=name, f=Func(f"F{i - 1}"), **INT32S)
            else:
                g.node("Identity", source, name=name, T=Type("int32"))
    g.main()
    g.placeholder("x", "int32")
    g.node("PartitionedCall", "x", name="call", f=Func("F59"), **INT32S)
    with pytest.raises(InvalidModel, match="max_nodes"):
        ps.load(g.bytes(), limits=ps.Limits(max_nodes=1000))


def doubling(op: str, times: int = 40) -> Builder:
    """A graph of functions that use the one before twice each, by nodes of operation ``op``."""
    g = Builder()
    for i in range(times):
        g.function(f"F{i}", {"x": "int32"}, {"y": "int32"}, {"y": "b:output:0"})
        for name, source in (("a", "x"), ("b", "a:output:0")):
            if not i:
                g.node("Identity", source, name=name, T=Type("int32"))
            elif op == "If":
                branches = {"then_branch": Func(f"F{i - 1}"), "else_branch": Func(f"F{i - 1}")}
                types = {"Tcond": Type("int32"), "Tin": [Type("int32")], "Tout": [Type("int32")]}
                g.node("If", source, source, name=name, **branches, **types)
            else:
                g.node(op, source, name=name, f=Func(f"F{i - 1}"), **INT32S)
    g.main()
    g.placeholder("x", "int32")
    g.node("PartitionedCall", "x", name="call", f=Func(f"F{times - 1}"), **INT32S)
    return g


@pytest.mark.parametrize("op", ["PartitionedCall", "If"])
def test_expansion_out_of_proportion_to_the_file_is_refused_before_it_happens(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Importer, "import_nodes", lambda *_: pytest.fail("nodes are imported"))
    for limits in (ps.Limits(max_nodes=None), ps.Limits(max_nodes_per_byte=None)):
        with pytest.raises(InvalidModel, match="function bodies expanded"):
            ps.load(doubling(op).bytes(), limits=limits)


def test_nodes_are_counted_before_expansion_as_they_are_imported() -> None:
    g = doubling("PartitionedCall", 4)
    g.function("C", {"x": "int32"}, {"t": "bool"}, {"t": "l:z:0"})
    g.const(np.int32(3), "three")
    g.node("Less", "x", "three:output:0", name="l", T=Type("int32"))
    g.main()
    g.node("While", "x", name="loop", cond=Func("C"), body=Func("F2"), T=[Type("int32")])
    proto = g.proto
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(proto.library, diagnostics.where, diagnostics.limits)
    Importer(proto.node, 0, library, diagnostics).model(None)
    assert diagnostics.nodes == library.expanded_nodes(proto.node)
