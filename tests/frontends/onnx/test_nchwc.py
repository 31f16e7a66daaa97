"""Models that ONNX Runtime saved in its layout of blocks, with weights for this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.frontends.onnx.nchwc import DOMAIN
from tests.support.saved_models import Net, saved

pytestmark = pytest.mark.filterwarnings("ignore:the model was saved in a layout of ONNX Runtime")


def residual(net: Net, c: int) -> list[str]:
    """Relu, a depthwise and a pointwise convolution, and a sum."""
    x = net.add("Relu", net.conv("x", 3, c, strides=[2, 2]))
    y = net.add("Relu", net.conv(x, c, c, group=c))
    return [net.add("Relu", net.add("Add", net.conv(y, c, c, kernel=1), x))]


def pools(net: Net, c: int) -> list[str]:
    window: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    x = net.add(
        "Clip",
        net.conv("x", 3, c, bias=False),
        net.constant(np.float32(0)),
        net.constant(np.float32(6)),
    )
    parts = (
        net.add("MaxPool", x, **window),
        net.add("AveragePool", x, count_include_pad=1, **window),
    )
    y = net.add("Sigmoid", net.conv(net.add("Concat", *parts, axis=1), 2 * c, c))
    return [net.add("GlobalMaxPool", y), y]


def excitation(net: Net, c: int) -> list[str]:
    x = net.conv("x", 3, c)
    gate = net.add("Sigmoid", net.conv(net.add("GlobalAveragePool", x), c, c, kernel=1))
    return [net.add("Relu", net.conv(net.add("Mul", x, gate), c, c))]


def upsampled(net: Net, c: int) -> list[str]:
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    x = net.conv("x", 3, c, strides=[2, 2])
    modes: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    y = net.add("Resize", x, "", scales, nearest_mode="floor", **modes)
    return [net.add("Add", net.conv(y, c, c), net.conv("x", 3, c))]


def interpolated(net: Net, c: int) -> list[str]:
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    x = net.conv("x", 3, c, strides=[2, 2])
    y = net.add("Resize", x, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
    return [net.conv(y, c, c)]


def grouped(net: Net, c: int) -> list[str]:
    x = net.add("HardSigmoid", net.conv("x", 3, 2 * c))
    return [net.add("LeakyRelu", net.conv(x, 2 * c, 2 * c, group=2), alpha=0.1)]


def run_by_onnxruntime(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, {"x": x})[0])


NETS = [residual, pools, excitation, upsampled, interpolated, grouped]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("channels", [16, 20, 24, 32, 40, 48])
def test_saved_model_gives_what_the_plain_one_gives(
    net: Callable[[Net, int], list[str]], channels: int, tmp_path: Path
) -> None:
    writer = Net()
    plain = writer.model(3, *net(writer, channels))
    blocked = saved(plain, tmp_path, "ORT_ENABLE_ALL")
    assert any(node.domain == DOMAIN for node in blocked.graph.node)
    x = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)
    wanted = ps.compile(plain).run({"x": x})
    for got, want in zip(ps.compile(blocked).run({"x": x}).values(), wanted.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [20, 32])
def test_saved_model_of_images_of_any_size_gives_what_the_plain_one_gives(
    channels: int, tmp_path: Path
) -> None:
    """Channels behind nodes in blocks follow from the nodes that they become."""
    writer = Net()
    x = writer.add(
        "Clip", writer.conv("x", 3, channels), *(writer.constant(np.float32(c)) for c in (0, 6))
    )
    y = writer.add("Exp", writer.add("Mul", x, writer.add("GlobalAveragePool", x)))
    plain = writer.model_of(["batch", 3, "height", "width"], writer.conv(y, channels, channels))
    x_value = np.random.default_rng(1).standard_normal((2, 3, 9, 7)).astype(np.float32)
    sessions = [ps.compile(m) for m in (plain, saved(plain, tmp_path, "ORT_ENABLE_ALL"))]
    want, got = (session(x_value) for session in sessions)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [20, 32])
def test_saved_model_of_channels_known_in_a_run_gives_what_the_plain_one_gives(
    channels: int, tmp_path: Path
) -> None:
    """The channels of an image that a Reshape to a computed shape makes, as vision transformers do."""
    writer = Net()
    size = writer.constant(np.array([1, -1], np.int64))
    shape = writer.add("Concat", size, writer.add("Shape", "x", start=2), axis=0)
    image = writer.add("Reshape", writer.add("Exp", "x"), shape)
    y = writer.conv(writer.add("Relu", writer.conv(image, channels, channels)), channels, channels)
    plain = writer.model_of(["one", channels, "height", "width"], y)
    x_value = np.random.default_rng(1).standard_normal((1, channels, 9, 7)).astype(np.float32)
    blocked = saved(plain, tmp_path, "ORT_ENABLE_ALL")
    assert "ReorderInput" in {node.op_type for node in blocked.graph.node}
    want = run_by_onnxruntime(plain, x_value)
    np.testing.assert_allclose(ps.compile(blocked)(x_value), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("net", [residual, pools, excitation, upsampled, grouped])
def test_saved_model_of_whole_blocks_has_the_steps_of_the_plain_one(
    net: Callable[[Net, int], list[str]], tmp_path: Path
) -> None:
    writer = Net()
    plain = writer.model(3, *net(writer, 32))
    shapes = {"x": (2, 3, 16, 16)}
    counts = [
        len(ps.compile(model, shapes=shapes).source.splitlines())
        for model in (plain, saved(plain, tmp_path, "ORT_ENABLE_ALL"))
    ]
    assert counts[0] == counts[1]


def test_saved_model_is_imported_without_pads_and_slices_around_convolutions(
    tmp_path: Path,
) -> None:
    writer = Net()
    x = writer.conv(writer.add("Relu", writer.add("Neg", "x")), 20, 24)
    model = saved(writer.model(20, writer.add("Neg", x)), tmp_path, "ORT_ENABLE_ALL")
    session = ps.compile(model, shapes={"x": (1, 20, 16, 16)})
    assert not {"pad", "slice"} & set(session.source.split())


def blocked_conv(filters: int, **attrs: Any) -> onnx.ModelProto:
    """Conv and ReorderOutput, as no runtime may have written them."""
    writer = Net()
    writer.constant(np.ones((filters, 3, 3, 3), np.float32))
    y = writer.add("Conv", "x", "c0", domain=DOMAIN)
    y = writer.add("ReorderOutput", y, domain=DOMAIN, **attrs)
    model = writer.model(3, y)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def test_size_of_blocks_follows_from_sizes_of_weights() -> None:
    ps.load(blocked_conv(24, channels=24))
    ps.load(blocked_conv(32, channels=20))
    with pytest.raises(Unsupported, match="neither of 8 nor of 16"):
        ps.load(blocked_conv(20, channels=20))
    with pytest.warns(RuntimeWarning, match="blocks of 8 or 16"):
        ps.load(blocked_conv(32, channels=32))


def test_nodes_in_blocks_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidModel, match="ReorderOutput"):
        ps.load(blocked_conv(24))
    model = blocked_conv(24, channels=24)
    model.graph.node[1].CopyFrom(helper.make_node("Flatten", ["v0"], ["v1"]))
    with pytest.raises(Unsupported, match="reads values in blocks"):
        ps.load(model)
    model.graph.node[0].op_type = "Gather"
    with pytest.raises(Unsupported, match="no kernel"):
        ps.load(model)


def test_operations_of_a_saved_model_are_all_of_onnx(tmp_path: Path) -> None:
    writer = Net()
    model = ps.load(saved(writer.model(3, *residual(writer, 20)), tmp_path, "ORT_ENABLE_ALL"))
    domains = Counter(node.op.domain for node in model.graph.walk())
    assert set(domains) == {""}
