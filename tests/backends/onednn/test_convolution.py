"""ConvTranspose, Resize and GlobalMaxPool: oneDNN against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import penstock as ps
from penstock.backends.onednn.kernel import PrimitiveCache
from penstock.backends.onednn.library import library
from penstock.ops.common.constant_cache import held
from tests.backends.onednn.forced import (
    check,
    compile_on_onednn,
    one_node,
    proto_of,
    ran_on,
    refused,
)

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


DECONVOLUTIONS = {
    "plain": ((1, 4, 5, 6), (4, 5, 3, 3), {}),
    "strided": ((2, 4, 5, 6), (4, 5, 2, 2), {"strides": [2, 2]}),
    "padded": ((1, 4, 5, 6), (4, 8, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "padded more before": ((1, 4, 5, 6), (4, 5, 3, 3), {"pads": [2, 1, 0, 0]}),
    "longer at the end": (
        (1, 4, 5, 6),
        (4, 5, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    ),
    "longer than windows reach": (
        (1, 4, 5, 6),
        (4, 5, 3, 3),
        {"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]},
    ),
    "dilated": ((1, 4, 5, 6), (4, 5, 3, 3), {"dilations": [2, 2]}),
    "grouped": ((1, 4, 5, 6), (4, 5, 3, 3), {"group": 2}),
    "depthwise": ((1, 4, 5, 6), (4, 1, 3, 3), {"group": 4, "strides": [2, 2]}),
    "same": ((1, 4, 5, 6), (4, 5, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same, more before": (
        (1, 4, 5, 6),
        (4, 6, 5, 4),
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    ),
    "of a shape": ((1, 4, 5, 6), (4, 5, 3, 3), {"strides": [3, 2], "output_shape": [15, 13]}),
    "one axis": ((2, 4, 9), (4, 6, 4), {"strides": [2]}),
    "three axes": ((1, 2, 3, 4, 5), (2, 4, 2, 3, 2), {"strides": [2, 1, 2]}),
    "many filters": ((1, 64, 8, 8), (64, 32, 2, 2), {"strides": [2, 2]}),
}


@pytest.mark.parametrize("tail", ["Neg", "Relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", DECONVOLUTIONS)
def test_conv_transpose_equals_numpy(name, bias, tail):
    shape, weights, attrs = DECONVOLUTIONS[name]
    feeds, constants = {"x": draw(*shape)}, {"w": draw(*weights)}
    if bias:
        constants["b"] = draw(weights[1] * attrs.get("group", 1))
    proto = one_node("ConvTranspose", feeds, constants, **attrs)
    proto.graph.node[-1].op_type = tail
    check(proto, feeds, "ConvTranspose", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
@pytest.mark.parametrize("bias", [True, False])
def test_conv_transpose_post_ops_run_as_a_primitive_of_their_own(bias, executor):
    feeds = {"x": draw(2, 8, 5, 6), "z": draw(2, 16, 9, 11)}
    constants = {"w": draw(8, 16, 3, 3), "s": draw(16, 1, 1), "b": draw(16)}
    names = ["x", "w", "b"][: 2 + bias]
    strides = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("ConvTranspose", names, ["c"], **strides),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Mul", ["r", "s"], ["m"]),
        helper.make_node("Add", ["m", "z"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["y"]),
    ]
    proto = proto_of(nodes, feeds, ["y"], constants)
    session = check(proto, feeds, "ConvTranspose", executor=executor, rtol=1e-3, atol=1e-4)
    # Beside copies of the feeds with their channels last.
    (step,) = [step for step in session.inspect.plan.walk() if step.node.op.name != "Reorder"]
    primitives = step.kernel.binder.packed
    assert primitives.then is not None
    assert not primitives.is_reference_impl


@pytest.mark.parametrize("dims", [(2, 32, 1, 1), (2, 1, 16, 16), (1, 32, 16, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_operand_that_is_broadcast_takes_no_code_for_single_elements(name, dims):
    """As networks of diffusion add what the time embeds to, for each image and channel."""
    feeds = {"x": draw(2, 32, 16, 16), "b": draw(*dims)}
    nodes = [
        helper.make_node(name, ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["y"]),
    ]
    proto = proto_of(nodes, feeds, ["y"], {"w": draw(32, 32, 3, 3)})
    session = ps.compile(proto, backends=["onednn", "numpy"])
    wanted = ps.compile(proto, executor="interpret").run(feeds)["y"]
    np.testing.assert_allclose(session.run(feeds)["y"], wanted, rtol=1e-3, atol=1e-3)
    ran = [
        bound
        for step in session.inspect.plan.walk()
        if isinstance(step.kernel.binder, PrimitiveCache) and step.node.op.name != "Reorder"
        for bound in step.kernel.binder._primitives.values()
    ]
    assert ran
    assert not any(bound.is_reference_impl for bound in ran)
    # Deconvolutions that go by a convolution's code apply post-ops element by element.
    assert not any(bound.primitive.implementation.startswith("conv:any") for bound in ran)


@pytest.mark.parametrize("group", [1, 2])
def test_conv_transpose_plans_for_other_shapes_share_weights(group):
    feeds = {"x": draw(1, 8, 5, 6)}
    proto = one_node("ConvTranspose", feeds, {"w": draw(8, 16, 3, 3)}, group=group)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    session = compile_on_onednn(proto, executor="linear")
    session.run(feeds)
    before = held()
    for n in range(2, 6):
        session.run({"x": draw(n, 8, 5, 6)})
    assert held() == before
    assert ran_on(session, "ConvTranspose") == {"onednn"}


@pytest.mark.parametrize(("weights", "group"), [((4, 3, 3, 3), 1), ((4, 1, 2, 2), 4)])
def test_conv_transpose_with_few_filters_runs_on_numpy(weights, group):
    feeds = {"x": draw(1, 4, 5, 6)}
    proto = one_node("ConvTranspose", feeds, {"w": draw(*weights)}, group=group)
    refused(proto, feeds, "ConvTranspose", rtol=1e-3, atol=1e-4)


def test_conv_transpose_with_computed_weights_runs_on_numpy():
    feeds = {"x": draw(1, 4, 5, 6), "w": draw(4, 5, 3, 3)}
    refused(one_node("ConvTranspose", feeds), feeds, "ConvTranspose")
