"""Saved sessions that were made to do harm: each is refused with an error of Penstock's, or gives
the answers that it would give untouched."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import penstock as ps
from penstock.backends.registry import available
from tests.session.test_artifact import image, net, products
from tests.support.onnx_text import compile_text
from tests.support.tf_graphs import Flow
from tests.support.tf_graphs import Shape as TfShape
from tests.support.tf_graphs import Type as TfType
from tools.mutations import SavedDocuments

Documents = dict[str, Any]
Edit = Callable[[Documents], object]

NET = f"""net (float[4, 64] x) => (float[4, 64] y, float[4] z)
    <float[64] k = {{{", ".join(["1.5"] * 64)}}}, float o = {{2.5}}, int64[1] one = {{1}}> {{
    m = Mul(x, k) a = Add(m, o) c = Tanh(a) z = ReduceSum<keepdims=0>(c, one)
    v, i = TopK<axis=0, largest=1>(c, one) e = Expand(v, s) f = Mul(e, c) y = Softmax(f) }}"""
FEEDS = {"x": np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)}


def saved(path: Path) -> dict[str, Any]:
    """Save a session; return its answers."""
    text = NET.replace("int64[1] one = {1}", "int64[1] one = {1}, int64[2] s = {4, 64}")
    session = compile_text(text, executor="linear", threads=1)
    answers = session.run(FEEDS)
    session.save(path)
    return answers


def rewritten(path: Path, edit: Edit) -> None:
    """Let ``edit`` change the documents of a file (``SavedDocuments.by_name``)."""
    saved = SavedDocuments(path.read_bytes())
    edit(saved.by_name)
    path.write_bytes(saved.to_bytes())


class Plan:
    """The saved plan among the documents, to be changed."""

    def __init__(self, documents: Documents) -> None:
        self.document = documents["plan 0"]
        self.values: list[Any] = self.document["values"]
        self.graph = self.document["graphs"]["main"]
        self.nodes: list[Any] = self.graph["nodes"]

    def node(self, op: str) -> list[Any]:
        """Return the first node of an operation."""
        names = [name for _, name, _ in self.document["ops"]]
        return next(node for node in self.nodes if names[node[0]] == op)

    def region(self) -> dict[str, Any]:
        return self.node("Fused")[3]["region"]["region"]

    def named(self, name: str) -> int:
        return next(
            i for i, v in enumerate(self.values) if v == name or (type(v) is list and v[0] == name)
        )


def nested(depth: int, innermost: Any, key: str | None = None) -> Any:
    x = innermost
    for _ in range(depth):
        x = [x] if key is None else {key: x}
    return x


def in_plan(change: Callable[[Plan], object]) -> Edit:
    return lambda documents: change(Plan(documents))


def in_head(**entries: Any) -> Edit:
    return lambda documents: documents["head"].update(entries)


def in_options(**entries: Any) -> Edit:
    return lambda documents: documents["head"]["options"].update(entries)


def in_array(i: int, *entry: Any) -> Edit:
    return lambda documents: documents["arrays"].__setitem__(i, [*entry])


def replace_region_input(plan: Plan) -> None:
    """The region sees the longer input of the graph where its node reads a shorter constant."""
    plan.region()["inputs"][1] = plan.named("x")


def shorten_constant(plan: Plan) -> None:
    """The node of a region reads one number where the region has a constant of 64."""
    plan.node("Fused")[1][1] = plan.region()["inputs"][2]


def widen_input(plan: Plan) -> None:
    """A region takes the graph's input for its own, and so gives that the type of what its node
    reads, a million numbers, which a kernel would read of the 256 that are fed."""
    x, fused, softmax = plan.named("x"), plan.node("Fused"), plan.node("Softmax")
    plan.document["ops"].append(["", "Concat", 10**9])
    plan.values += ["joined", "q", "r"]
    concat, joined, q, r = (
        len(plan.document["ops"]) - 1,
        *range(len(plan.values) - 3, len(plan.values)),
    )
    tanh = [plan.region()["nodes"][-1][0], [x], [r]]
    region = {"region": {"region": {"inputs": [x], "nodes": [tanh]}}, "ops": "Tanh"}
    plan.nodes[:] = [
        [concat, [plan.named("k")] * 20_000, [joined], {"axis": 0}],
        [fused[0], [joined], [q], region],
        [softmax[0], [x], softmax[2], {"axis": -1}],
        [softmax[0], [x], plan.node("ReduceSum")[2], {"axis": 0}],
    ]
    plan.document["placement"] = ["numpy", "native", "native", "native"]
    del plan.document["arena"]


def add_rows(plan: Plan) -> None:
    """The plan is for a thousand times as many rows as its key says, and reads them all."""
    x, softmax = plan.named("x"), plan.node("Softmax")
    plan.values[x] = ["x", ["float32", [4096, 64]]]
    plan.nodes[:] = [
        [softmax[0], [x], softmax[2], {"axis": -1}],
        [softmax[0], [x], plan.node("ReduceSum")[2], {"axis": -1}],
    ]
    plan.document["placement"] = ["native", "native"]
    del plan.document["arena"]


def share_region_output(plan: Plan) -> None:
    """A node inside the region produces the value that a node outside produces."""
    plan.region()["nodes"][-1][2] = [plan.named("z")]


def nest_region(plan: Plan) -> None:
    """A node inside a region is a region."""
    plan.region()["nodes"].append(json.loads(json.dumps(plan.node("Fused"))))


ATTACKS: dict[str, Edit] = {
    # Regions.
    "region input is another value": in_plan(replace_region_input),
    "region has a longer constant": in_plan(shorten_constant),
    "region types an input of the graph": in_plan(widen_input),
    "region makes a value of the graph": in_plan(share_region_output),
    "region lists an input twice": in_plan(
        lambda p: p.region().update(inputs=[p.region()["inputs"][0]] * 3)
    ),
    "region has no inputs": in_plan(lambda p: p.region().update(inputs=[])),
    "region constant is another one": in_plan(
        lambda p: (
            p.values.append(["w", None, 1]),
            p.region()["inputs"].__setitem__(1, len(p.values) - 1),
            p.region()["nodes"][0][1].__setitem__(1, len(p.values) - 1),
        )
    ),
    "region contains a region": in_plan(nest_region),
    "region node is a view": in_plan(
        lambda p: (
            p.document["ops"].append(["", "Shape", 21]),
            p.region()["nodes"][-1].__setitem__(0, len(p.document["ops"]) - 1),
        )
    ),
    # Values.
    "node makes a constant": in_plan(lambda p: p.node("Fused").__setitem__(2, [p.named("k")])),
    "graph input is a constant": in_plan(lambda p: p.graph.update(inputs=[p.named("k")])),
    "node makes an input": in_plan(lambda p: p.node("Fused").__setitem__(2, [p.named("x")])),
    "two nodes make a value": in_plan(
        lambda p: p.node("Softmax").__setitem__(2, p.node("Fused")[2])
    ),
    "node makes a value twice": in_plan(
        lambda p: p.node("TopK").__setitem__(2, [p.node("TopK")[2][0]] * 2)
    ),
    "node reads itself": in_plan(lambda p: p.node("Softmax").__setitem__(1, p.node("Softmax")[2])),
    "node reads what none makes": in_plan(
        lambda p: (
            p.values.append(["ghost", ["float32", [2**40]]]),
            p.node("Softmax").__setitem__(1, [len(p.values) - 1]),
        )
    ),
    "nodes in a circle of control": in_plan(
        lambda p: (p.nodes[0].__setitem__(5, [1]), p.nodes[1].__setitem__(5, [0]))
    ),
    "negative place": in_plan(lambda p: p.node("Softmax").__setitem__(1, [-1])),
    "place is true": in_plan(lambda p: p.node("Softmax").__setitem__(1, [True])),
    "place is huge": in_plan(lambda p: p.node("Softmax").__setitem__(1, [2**70])),
    "output of the graph is the input": in_plan(lambda p: p.graph.update(outputs=[0, 0])),
    "outputs are left out": in_plan(lambda p: p.graph.update(outputs=[])),
    "constant of strings": in_array(0, "string", [64], ["x"] * 64),
    "name breaks out of the program": in_plan(
        lambda p: p.values.__setitem__(p.node("Fused")[2][0], 'c"\n1/0\n#')
    ),
    "node breaks out of the program": in_plan(
        lambda p: [
            n.__setitem__(slice(4, None), ["a\n1/0", [], "b\n1/0", "c\n1/0"]) for n in p.nodes
        ]
    ),
    "graph breaks out of the program": in_plan(lambda p: p.graph.update(name='"\n1/0\n#')),
    # Attributes.
    "attribute nests deep": in_plan(
        lambda p: p.node("Softmax").__setitem__(3, {"axis": nested(400, 1)})
    ),
    "attribute nests deeper than stacks": in_plan(
        lambda p: p.node("Softmax").__setitem__(3, {"axis": nested(900, 1)})
    ),
    "attribute is a fraction": in_plan(lambda p: p.node("Softmax").__setitem__(3, {"axis": 0.5})),
    "attribute is a text": in_plan(lambda p: p.node("TopK").__setitem__(3, {"axis": "0"})),
    "attribute is huge": in_plan(lambda p: p.node("TopK").__setitem__(3, {"axis": 2**80})),
    "attribute is an array": in_plan(
        lambda p: p.node("TopK").__setitem__(3, {"axis": {"array": 0}})
    ),
    "attribute is a list of an array": in_plan(
        lambda p: p.node("ReduceSum").__setitem__(3, {"keepdims": {"list": 0}})
    ),
    "attribute is bytes": in_plan(
        lambda p: p.node("TopK").__setitem__(3, {"largest": {"bytes": "zz"}})
    ),
    "type nests deep": in_plan(
        lambda p: p.values.append(["t", nested(450, ["float32", [1]], "sequence")])
    ),
    "type nests deeper than stacks": in_plan(
        lambda p: p.values.append(["t", nested(300, ["float32", [1]], "optional")])
    ),
    "dim is 2^63": in_plan(lambda p: p.values.__setitem__(0, ["x", ["float32", [2**63, 2]]])),
    "dims multiply to 2^126": in_plan(
        lambda p: p.values.__setitem__(0, ["x", ["float32", [2**62] * 2]])
    ),
    "dim is negative": in_plan(lambda p: p.values.__setitem__(0, ["x", ["float32", [-4, 64]]])),
    "input has more rows": in_plan(add_rows),
    "input has another dtype": in_plan(
        lambda p: p.values.__setitem__(0, ["x", ["float64", [4, 64]]])
    ),
    "operation of another domain": in_plan(
        lambda p: p.document["ops"].__setitem__(1, ["penstock", "Transfer", 1])
    ),
    "operation that is none": in_plan(
        lambda p: p.document["ops"].__setitem__(1, ["os", "system", 1])
    ),
    "reorder with an order that is none": in_plan(
        lambda p: (
            p.document["ops"].append(["penstock", "Reorder", 1]),
            p.node("Softmax").__setitem__(
                slice(0, 4),
                [len(p.document["ops"]) - 1, *p.node("Softmax")[1:3], {"order": {"tuple": [0, 0]}}],
            ),
        )
    ),
    # Plans.
    "all on native kernels": in_plan(
        lambda p: p.document.update(placement=["native"] * len(p.document["placement"]))
    ),
    "on no backend": in_plan(
        lambda p: p.document.update(placement=[""] * len(p.document["placement"]))
    ),
    "placement is too short": in_plan(lambda p: p.document["placement"].pop()),
    "placement is of lists": in_plan(lambda p: p.document["placement"].__setitem__(0, [])),
    "buffers all at 0": in_plan(
        lambda p: p.document["arena"].__setitem__(1, [[s, 0] for s, _ in p.document["arena"][1]])
    ),
    "buffer at -64": in_plan(lambda p: p.document["arena"][1][0].__setitem__(1, -64)),
    "buffer at 2^62": in_plan(lambda p: p.document["arena"][1][0].__setitem__(1, 2**62)),
    "buffer between boundaries": in_plan(lambda p: p.document["arena"][1][0].__setitem__(1, 4)),
    "buffer at true": in_plan(lambda p: p.document["arena"][1][0].__setitem__(1, True)),
    "steps backwards": in_plan(lambda p: p.document["arena"][0].reverse()),
    "a step twice": in_plan(lambda p: p.document["arena"][0].__setitem__(0, 1)),
    "steps are fractions": in_plan(
        lambda p: p.document["arena"].__setitem__(0, [float(i) for i in p.document["arena"][0]])
    ),
    "arena of another planner": in_plan(lambda p: p.document["arena"].__setitem__(2, {"a": 1})),
    "arena has no entries": in_plan(lambda p: p.document.update(arena=[])),
    "copies of an array that is none": in_plan(
        lambda p: p.document.update(copies=[[99, "native", {}]])
    ),
    "copies of a backend that is none": in_plan(
        lambda p: p.document.update(copies=[[0, "numpy", {"a": 0}]])
    ),
    "copies are no names": in_plan(lambda p: p.document.update(copies=[[0, "native", [1]]])),
    # The container.
    "array outside of the file": in_array(0, "float32", [64], 2**40 // 64 * 64, 256, 0),
    "array of 2^61 elements": in_array(0, "float32", [2**61], 64, 2**61 * 4 - 2**62, 0),
    "array of 0 x 2^61 elements": in_array(0, "float32", [0, 2**61], 64, 0, 0),
    "array of 65 dims": in_array(0, "float32", [1] * 65, 64, 4, 0),
    "array of objects": in_array(0, "object", [64], 64, 512, 0),
    "array of voids": in_array(0, "V8", [64], 64, 512, 0),
    "array of dates": in_array(0, "datetime64", [64], 64, 512, 0),
    "array of a negative shape": in_array(0, "float32", [-64], 64, 256, 0),
    "array of no entries": in_array(0),
    "arrays are a dict": lambda documents: documents.update(arrays={"0": 1}),
    "plan is no JSON": lambda documents: documents.update({"plan 0": b"\xff\xfe["}),
    "plan is brackets": lambda documents: documents.update({"plan 0": b"[" * 100_000}),
    "plan is NaN": lambda documents: documents.update({"plan 0": b"NaN"}),
    "head is a list": lambda documents: documents.update(head=[]),
    # The head.
    "plans are unhashable": in_head(plans=[[{"a": 1}]] * 3),
    "plans are a number": in_head(plans=3),
    "inputs have one name": in_head(inputs=[["x", None], ["x", None]]),
    "inputs nest deep": in_head(inputs=[["x", nested(900, ["float32", [1]], "sequence")]]),
    "outputs are more": in_head(outputs=[["y", None]] * 5),
    "graph that is none": in_head(graphs=["net", "other"]),
    "entry that is none": in_head(entry="other"),
    "signatures are numbers": in_head(signatures=[1]),
    "masks are a number": in_head(masks=1),
    "masks are lists": in_head(masks=[[0]]),
    "mask that is no input": in_head(masks=[99]),
    "executor that is none": in_options(executor="os.system"),
    "precision that is none": in_options(precision="int1"),
    "planner that is none": in_options(memory_planner="none"),
    "threads are many": in_options(threads=2**70),
    "threads are negative": in_options(threads=-1),
    "places that are none": in_options(place={"Softmax": "gpu"}),
    "options that are none": in_options(after_pass="print"),
}


CHANGES = {"region types an input of the graph", "output of the graph is the input"}
"""attacks after which a plan computes something else, as another model would"""
HARMLESS = {
    "region makes a value of the graph",
    *("name breaks out of the program", "node breaks out of the program"),
    *("graph breaks out of the program", "on no backend", "buffers all at 0", "buffer at -64"),
    *("buffer at 2^62", "buffer between boundaries", "buffer at true", "steps backwards"),
    *("a step twice", "arena of another planner", "plans are unhashable", "graph that is none"),
    "threads are many",
}
"""attacks on what is not used then: the answers stay"""

FLOW = """flow (float[3] x, int64 n, bool c) => (float[3] y, float[3] z) {
    y = If(c) <then_branch = t () => (float[3] a) { a = Exp(x) },
              else_branch = e () => (float[3] b) { b = Neg(x) }>
    z = Loop(n, c, x) <body = l (int64 i, bool go, float[3] s) => (bool go2, float[3] s2) {
        go2 = Identity(go) s2 = Add(s, x) }> }"""


def in_graph(op: str, name: str, change: Callable[[Plan, dict[str, Any]], object]) -> Edit:
    """A change of a graph among the attributes of a node."""

    def edit(documents: Documents) -> None:
        plan = Plan(documents)
        change(plan, plan.node(op)[3][name]["graph"])

    return edit


def own_input(plan: Plan, graph: dict[str, Any]) -> None:
    """A graph has an input more, of a type of the file's choice, which its first node reads."""
    plan.values.append(["more", ["float32", [2**20]]])
    graph["inputs"].append(len(plan.values) - 1)
    graph["nodes"][-1][1][0] = len(plan.values) - 1


def read_other_branch(plan: Plan, graph: dict[str, Any]) -> None:
    graph["nodes"][0][1][0] = plan.node("If")[3]["else_branch"]["graph"]["outputs"][0]


def read_from_outside(plan: Plan, graph: dict[str, Any]) -> None:
    plan.graph["outputs"][0] = graph["outputs"][-1]


CONTROL: dict[str, Edit] = {
    "branch has inputs": in_graph("If", "then_branch", own_input),
    "body has more inputs": in_graph("Loop", "body", own_input),
    "body has less inputs": in_graph("Loop", "body", lambda p, g: g["inputs"].pop()),
    "body has less outputs": in_graph("Loop", "body", lambda p, g: g["outputs"].pop()),
    "body has no outputs": in_graph("Loop", "body", lambda p, g: g["outputs"].clear()),
    "branch has no outputs": in_graph("If", "then_branch", lambda p, g: g["outputs"].clear()),
    "branch reads the other": in_graph("If", "then_branch", read_other_branch),
    "graph reads its branch": in_graph("If", "then_branch", read_from_outside),
    "target is no node": in_graph("If", "then_branch", lambda p, g: g.update(targets=[9])),
    "loop has no body": in_plan(lambda p: p.node("Loop").__setitem__(3, {})),
    "body is a list": in_plan(lambda p: p.node("Loop")[3].update(body=[p.node("Loop")[3]["body"]])),
    "branch is the body": in_plan(
        lambda p: p.node("If")[3].update(then_branch=p.node("Loop")[3]["body"])
    ),
}


def in_copies(change: Callable[[Documents, dict[str, int]], object]) -> Edit:
    def edit(documents: Documents) -> None:
        of_constants = [names for _, _, names in documents["plan 0"]["copies"] if names]
        assert of_constants
        for names in of_constants:
            change(documents, names)

    return edit


def as_type(dtype: str, size: int) -> Edit:
    """All copies are arrays of another type, equally long."""

    def change(documents: Documents, names: dict[str, int]) -> None:
        for index in names.values():
            entry = documents["arrays"][index]
            entry[:2] = [dtype, [entry[3] // size]]

    return in_copies(change)


def as_texts(documents: Documents, names: dict[str, int]) -> None:
    for index in names.values():
        count = documents["arrays"][index][3] // 8
        documents["arrays"][index] = ["string", [count], ["x"] * count]


COPIES: dict[str, Edit] = {
    "of another type": as_type("float32", 4),
    "of texts": in_copies(as_texts),
    "of no names": in_copies(lambda documents, names: names.clear()),
    "of other names": in_copies(lambda documents, names: names.update({"": 0, "None": 1})),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "costs"))
    return tmp_path / "model.penstock"


@pytest.mark.filterwarnings("ignore:(the )?plans in")
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused_or_harmless(path: Path, attack: str, mapped: bool) -> None:
    expected = saved(path)
    rewritten(path, ATTACKS[attack])
    if attack in CHANGES:
        with ps.open(path, map_weights=mapped) as opened:
            assert opened.run(FEEDS).keys() == expected.keys()
    elif attack in HARMLESS:
        with ps.open(path, map_weights=mapped) as opened:
            for _ in range(2):
                answers = opened.run(FEEDS)
                for name, value in expected.items():
                    np.testing.assert_allclose(answers[name], value, rtol=1e-5)
    else:
        with pytest.raises(ps.PenstockError) as caught, ps.open(path, map_weights=mapped) as opened:
            opened.run(FEEDS)
        assert not isinstance(caught.value, ps.InternalError)


@pytest.mark.parametrize("mapped", [True, False])
def test_array_between_boundaries_is_refused(path: Path, mapped: bool) -> None:
    saved(path)
    file = path.read_bytes()

    def move(documents: Documents) -> None:
        dtype, shape, offset, count, _ = documents["arrays"][0]
        content = file[offset - 4 : offset - 4 + count]
        documents["arrays"][0] = [dtype, shape, offset - 4, count, google_crc32c.value(content)]

    rewritten(path, move)
    with pytest.raises(ps.InvalidModel, match="damaged"), ps.open(path, map_weights=mapped) as s:
        s.run(FEEDS)


@pytest.mark.parametrize("attack", CONTROL)
def test_attack_on_nested_graphs_is_refused(path: Path, attack: str) -> None:
    feeds = {"x": np.ones(3, np.float32), "n": np.int64(2), "c": np.bool_(True)}
    session = compile_text(FLOW, executor="linear", threads=1)
    session.run(feeds)
    session.save(path)
    rewritten(path, CONTROL[attack])
    with pytest.raises(ps.PenstockError) as caught, ps.open(path) as opened:
        opened.run(feeds)
    assert not isinstance(caught.value, ps.InternalError)


@pytest.mark.parametrize("backend", [b for b in ("native",) if b in available()])
@pytest.mark.parametrize("attack", COPIES)
def test_copies_of_another_form_are_not_used(path: Path, attack: str, backend: str) -> None:
    if backend == "native":
        session, x = products()
    else:
        session, x = net(executor="linear", threads=1, backends=["native", "numpy"]), image()
    expected = session.run(x)
    session.save(path)
    rewritten(path, COPIES[attack])
    with ps.open(path) as opened:
        np.testing.assert_allclose(opened.run(x)["y"], expected["y"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:plans in .*those of executor")
@pytest.mark.parametrize("names", [["model", "main", "plan 0"], ["model"], ["plan 0"]])
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
@pytest.mark.parametrize("backend", available())
def test_reads_of_variables_give_no_memory_beyond_their_values(
    tmp_path: Path, executor: str, backend: str, names: list[str]
) -> None:
    g = Flow()
    g.placeholder("x", "float32", -1, -1)
    number = {"dtype": TfType("float32")}
    g.node("VarHandleOp", name="v", shared_name="v", shape=TfShape([-1, -1]), **number)
    g.node("AssignVariableOp", "v", "x", name="set", **number)
    g.node("ReadVariableOp", "v", "^set", name="read", **number)
    g.const(np.ones((300, 300), np.float32), "w")
    g.node("MatMul", "read", "w", name="y", T=TfType("float32"))
    path = tmp_path / "model.penstock"
    x = {"x": np.ones((1, 300), np.float32)}
    session = ps.compile(
        g.bytes(), executor=executor, backends=list({backend: 0, "numpy": 0}), threads=1
    )
    assert session.run(x, ["y:0"])["y:0"].shape == (1, 300)
    session.save(path)

    def declare(documents: Documents) -> None:
        for name, document in documents.items():
            if name in names:
                for graph in document["graphs"].values():
                    for node in graph["nodes"]:
                        if document["ops"][node[0]][1] == "ReadVariableOp":
                            node[3]["shape"] = [300, 300]

    rewritten(path, declare)
    untouched = names == ["model"] or (executor == "frames" and names == ["plan 0"])
    with nullcontext() if untouched else pytest.raises(ps.PenstockError):
        assert ps.open(path).run(x, ["y:0"])["y:0"].tolist() == [[300.0] * 300]
