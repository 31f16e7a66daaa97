"""PRelu with oneDNN equals that of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, refused
from tests.backends.onednn.test_eltwise import PERMS
from tests.backends.onednn.test_normalization import draw

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("slopes", ["one", "channels", "all"])
def test_prelu_equals_numpy(slopes, perm):
    feeds = {"x": draw(2, 3, 4, 5)}
    dims = tuple(np.transpose(feeds["x"], perm or None or range(4)).shape)
    shape = {"one": (1,), "channels": (dims[1], 1, 1), "all": dims}[slopes]
    check(one_node("PRelu", feeds, {"s": draw(*shape)}, perm=perm), feeds, "PRelu")


def test_prelu_of_a_value_with_no_other_reader():
    feeds = {"x": draw(6, 17, 12, 9), "s": 3 + draw(6, 17, 12, 9)}
    check(one_node("PRelu", feeds), feeds, "PRelu")


def test_prelu_with_computed_slopes():
    for shape in ((3, 1, 1), (2, 3, 4, 5)):
        feeds = {"x": draw(2, 3, 4, 5), "s": draw(*shape)}
        check(one_node("PRelu", feeds), feeds, "PRelu")
    late = {"x": draw(2, 3, 4, 5), "s": draw(5)}
    refused(one_node("PRelu", late), late, "PRelu")
