"""Documents of a saved session that lie are refused or harmless."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.session.test_artifact import image, net
from tests.support.onnx_text import compile_text
from tests.support.sweeps import drawn
from tests.support.timing import SOON
from tools.mutations import changed_artifact


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.penstock"


@pytest.mark.parametrize("executor", ["linear", "parallel", "interpret", "frames"])
def test_sizes_of_saved_graphs_are_checked_before_plans_are_compiled(
    path: Path, executor: str
) -> None:
    text = """g (float[1, 1, 6, 6] x, float[1, 1, 3, 3] w) => (float[N, C, H, W] y)
        { c = Conv<pads = [100000, 1, 1, 1]>(x, w) y = MaxPool<kernel_shape = [2, 2]>(c) }"""
    compile_text(text, backends=["numpy"]).save(path)
    session = ps.compile(path, executor=executor, limits=ps.Limits(max_bytes=10_000))
    feeds = {"x": np.ones((1, 1, 6, 6), np.float32), "w": np.ones((1, 1, 3, 3), np.float32)}
    with pytest.raises(ps.LimitExceeded, match=r"'c', float32.*100005.*takes 2400120 bytes"):
        session.run(feeds)


def test_limits_hold_for_saved_graphs(path: Path) -> None:
    net(shapes={"x": (2, 3, 8, 8)}).save(path)
    with pytest.raises(ps.InvalidModel, match="more bytes"):
        ps.open(path, limits=ps.Limits(max_bytes=100))
    with pytest.raises(ps.InvalidModel, match="more nodes"):
        ps.open(path, limits=ps.Limits(max_nodes=1)).run(image())


@pytest.mark.parametrize("seed", drawn(range(400), 100))
def test_documents_that_lie_are_refused_or_harmless(path: Path, seed: int) -> None:
    net(shapes={"x": (2, 3, 8, 8)}, executor="linear").save(path)
    path.write_bytes(changed_artifact(path.read_bytes(), random.Random(seed)))
    try:
        opened = ps.open(path, limits=ps.Limits(max_bytes=1 << 26), strict=True)
        opened.run(image(), timeout=SOON)
        opened.run(image(), ["c"], timeout=SOON)
    except ps.PenstockError as error:
        assert not isinstance(error, ps.InternalError), error
