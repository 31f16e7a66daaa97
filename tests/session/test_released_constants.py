"""Constants whose contents kernels hold are dropped, and restored when they are read."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Contents, Value
from tests.backends.native.test_weights import CASES, model_of, normal
from tests.support.native_kernels import pytestmark  # noqa: F401
from tests.support.released import constants_read


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return constants_read(monkeypatch)


def test_weights_that_were_let_go_are_read_by_other_backends_and_fetches(given_back):
    model = ps.load(model_of("product"))
    session = ps.compile(model, threads=1)
    x = normal(4, 200)
    first = session.run({"x": x})["y"]
    assert given_back == []
    found = session.run({"x": x}, fetches=["w"])["w"]
    np.testing.assert_array_equal(found, CASES["product"][2])
    other = ps.compile(model, backends=["numpy"]).run({"x": x})["y"]
    np.testing.assert_allclose(first, other, rtol=1e-4, atol=1e-4)


def test_contents_are_given_back_when_they_are_asked_for():
    asked = []
    held, release, missing = Value("a", const=np.ones(2)), Value("b", const=np.zeros(3)), Value("c")
    release.release(lambda: asked.append("b") or np.full(3, 7.0))
    contents = Contents([held, None, release, missing])
    assert len(contents) == 4
    np.testing.assert_array_equal(contents[0], np.ones(2))
    assert (contents[1], contents[3], contents[-1]) == (None, None, None)
    assert len(contents[1:]) == 3
    assert asked == []
    np.testing.assert_array_equal(contents[1:][1], np.full(3, 7.0))
    assert asked == ["b"]
    assert [x is None for x in contents] == [False, True, False, True]
