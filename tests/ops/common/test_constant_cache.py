"""What is made of constants is made once, however many kernels there are, and goes with them."""

import gc
import threading

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.core.types import TensorType
from penstock.frontends.onnx.importer import load_onnx
from penstock.ops.common.constant_cache import held, shared
from tests.ops.harness import node_model

rng = np.random.default_rng(5)


def floats(*shape):
    return rng.normal(size=shape).astype(np.float32)


def codes(*shape):
    return rng.integers(0, 255, shape).astype(np.uint8)


def scalar(value, dtype=np.float32):
    return np.array(value, dtype)


MS = {"domain": "com.microsoft", "opset": 1}
TREE = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.0, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
}
# Operation, a first input for any size, the other inputs (constants), attributes, more.
CASES = {
    "depthwise": (
        "Conv",
        lambda n: floats(n, 64, 40, 40),
        [floats(64, 1, 3, 3)],
        {"group": 64, "pads": [1] * 4},
        {},
    ),
    "half": (
        "Conv",
        lambda n: floats(n, 4, 9, 9).astype(np.float16),
        [floats(4, 4, 3, 3).astype(np.float16)],
        {},
        {},
    ),
    "lstm": (
        "LSTM",
        lambda n: floats(3, n + 1, 4),
        [floats(1, 20, 4), floats(1, 20, 5)],
        {"hidden_size": 5},
        {},
    ),
    "product": ("MatMulInteger", lambda n: codes(n, 6), [codes(6, 5)], {}, {}),
    "filters": ("ConvInteger", lambda n: codes(n, 2, 8, 8), [codes(3, 2, 3, 3)], {}, {}),
    "few bits": (
        "MatMulNBits",
        lambda n: floats(n, 32),
        [codes(4, 1, 16), floats(4)],
        {"N": 4, "K": 32, "bits": 4, "block_size": 32},
        MS,
    ),
    "quantized lstm": (
        "DynamicQuantizeLSTM",
        lambda n: floats(3, n, 4),
        [
            *(codes(1, 4, 20), codes(1, 5, 20), None, None, None, None, None),
            *(floats(1), codes(1), floats(1), codes(1)),
        ],
        {"hidden_size": 5},
        MS,
    ),
    "forest": (
        "TreeEnsembleRegressor",
        lambda n: floats(n, 2),
        [],
        TREE,
        {"domain": "ai.onnx.ml", "opset": 3},
    ),
    "pattern": ("RegexFullMatch", lambda n: np.array(["a"] * n, object), [], {"pattern": "a+"}, {}),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_kernels_share_what_is_made_of_constants(name):
    op, first, constants, attrs, more = CASES[name]
    graph = load_onnx(node_model(op, [first(2), *constants], attrs, **more)).graph
    (node,) = graph.nodes
    for value, const in zip(node.inputs[1:], constants, strict=True):
        if value is not None:
            value.set_constant(const)
    gc.collect()
    before = held()
    kernels, counts = [], []
    for n in (2, 3, 5):
        x = first(n)
        rest = [None if v is None else v.type for v in node.inputs[1:]]
        kernels.append(node.op.compile(node, [TensorType(x.dtype, x.shape), *rest]))
        kernels[-1](x, *constants)
        counts.append(held() - before)
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    del kernels
    gc.collect()
    assert held() == before


def test_plans_of_a_session_share_their_weights():
    """All the memory that plans for other shapes add is theirs alone: no weights."""
    weights = helper.make_tensor("w", onnx.TensorProto.FLOAT, [64, 1, 3, 3], floats(576))
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Conv", ["x", "w"], ["y"], group=64, pads=[1] * 4)],
            "g",
            [helper.make_tensor_value_info("x", 1, ["N", 64, 40, 40])],
            [helper.make_tensor_value_info("y", 1, None)],
            [weights],
        ),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21)],
    )
    gc.collect()
    before = held()
    with ps.compile(model, backends=["numpy"]) as session:
        for n in range(1, 6):
            session(floats(n, 64, 40, 40))
        assert held() == before + 1


def test_names_and_sources_tell_values_apart():
    a, b = floats(2), floats(2)
    first = shared("double", lambda: a * 2, a)
    assert shared("double", lambda: a * 2, a) is first
    assert shared("double", lambda: b * 2, b) is not first
    assert shared("half", lambda: a / 2, a) is not first
    assert shared("double", lambda: a * 2, a, None) is not first


def test_threads_get_one_value():
    source, found = floats(2), []
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait()
        found.extend(shared("copy", source.copy, source) for _ in range(100))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
