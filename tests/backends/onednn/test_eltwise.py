"""Elementwise operations with oneDNN equal those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, proto_of, refused
from tests.backends.onednn.test_normalization import draw

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


PERMS = [(), (0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 2, 3)]


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("perm", PERMS)
def test_max_and_min_of_two_tensors(op, perm):
    x = draw(2, 3, 4, 5)
    two = {"x": x, "z": draw(*np.transpose(x, perm or range(4)).shape)}
    check(one_node(op, two, perm=perm), two, op)


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
def test_sum_mean_max_and_min_of_several_tensors_run_on_numpy(op):
    three = {name: draw(2, 3, 4) for name in "xyz"}
    refused(one_node(op, three, outputs=("out",)), three, op)


@pytest.mark.parametrize("shape", [(4, 4, 1, 1), (2, 17, 1), (3, 5, 1, 1, 1), (1, 6, 1, 1), (4, 6)])
def test_post_ops_on_channels_of_one_element(shape):
    channels = shape[1]
    parameters = [draw(channels) for _ in range(3)] + [np.abs(draw(channels)) + 1]
    known = dict(zip("abmv", parameters, strict=True))
    feeds = {"x": draw(*shape)}
    nodes = [helper.make_node("BatchNormalization", ["x", *known], ["y"])]
    check(proto_of(nodes, feeds, ["y"], known), feeds, "BatchNormalization")
    each = (1, channels, *(1,) * (len(shape) - 2))
    late = feeds | {"p": draw(*each), "q": draw(*each)}
    chain = [
        helper.make_node("Add", ["x", "x"], ["h"]),
        helper.make_node("Mul", ["h", "p"], ["k"]),
        helper.make_node("Sub", ["k", "q"], ["y"]),
    ]
    session = check(proto_of(chain, late, ["y"]), late, "Add")
    assert len(session.inspect.plan.steps) == 1
