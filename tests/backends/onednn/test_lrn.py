"""LRN with oneDNN equals that of NumPy."""

from __future__ import annotations

import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, refused
from tests.backends.onednn.test_normalization import draw

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


@pytest.mark.parametrize("size", [1, 3, 5, 9])
@pytest.mark.parametrize("shape", [(1, 64, 6, 5), (2, 7, 4, 5)])
def test_lrn_equals_numpy(shape, size):
    feeds = {"x": draw(*shape)}
    check(one_node("LRN", feeds, size=size, alpha=0.3, bias=1.5), feeds, "LRN")


def test_lrn_over_an_even_number_of_channels_runs_on_numpy():
    feeds = {"x": draw(2, 7, 4, 5)}
    refused(one_node("LRN", feeds, size=4), feeds, "LRN")
