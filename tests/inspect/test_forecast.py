"""Forecasts: simulated times of plans."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.inspect.forecast import forecast
from tests.support.onnx_text import compile_text

X = np.array([1, 2, 3], np.float32)

#   x -- Exp -- a -+- Neg -- b -+- Add -- y
#                  +- Sin -- c -+
DIAMOND = "g (float[N] x) => (float[N] y) { a = Exp(x) b = Neg(a) c = Sin(a) y = Add(b, c) }"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def compiled(text: str = DIAMOND, **options) -> ps.Session:
    return compile_text(text, **{"backends": ["numpy"], **options})


def test_forecast_lies_between_bound_and_serial():
    session = compiled(shapes={"x": [3]})
    times = {"Exp": 1.0, "Neg": 2.0, "Sin": 3.0, "Add": 1.0}
    for workers, makespan in ((1, 7.0), (2, 5.0), (8, 5.0)):
        result = forecast(
            session.inspect.plan,
            lambda step: times[step.node.op.name],
            workers,
            lambda step: step.node.op.name in ("Exp", "Sin"),
        )
        assert result.makespan == pytest.approx(makespan)
        assert result.serial == pytest.approx(7)
        assert result.critical_path == pytest.approx(5)
        assert result.bound == pytest.approx(max(5, 7 / workers))
        assert (result.kernels, result.measured) == (4, 2)
    with pytest.raises(ValueError, match="workers=0"):
        session.inspect.forecast(0)
