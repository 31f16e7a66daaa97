"""What notebooks and IPython's terminals show of sessions, plans and what observers have seen."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text

MODEL = "g (float[4] x) => (float[4] y) { a = Exp(x) y = Neg(a) }"


FEEDS = {"x": np.array([0, 1, 2, 3], np.float32)}


class Cells(HTMLParser):
    """Collects the text of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


class Printer:
    """IPython's printer, as far as it is used."""

    def __init__(self) -> None:
        self.written = ""

    def text(self, text: str) -> None:
        self.written += text


def in_terminal(shown: Any) -> str:
    printer = Printer()
    shown._repr_pretty_(printer, False)
    return printer.written


@pytest.fixture
def session() -> ps.Session:
    return compile_text(MODEL, backends=["numpy"])


def seen_by(session: ps.Session, observer: ps.Observer) -> Any:
    session.run(FEEDS, observers=[observer])
    return observer


def test_session_shows_its_ports(session: ps.Session) -> None:
    assert {"x", "y", "float32[4]"} <= set(Cells(session._repr_html_()).cells)
    assert "output  y     float32[4]" in in_terminal(session)


def test_plan_shows_its_steps(session: ps.Session) -> None:
    cells = Cells(session.inspect.plan._repr_html_()).cells
    assert cells.index("Exp") < cells.index("Neg")
    assert {"1", "2", "a: float32[4]", "numpy"} <= set(cells)
    assert "Exp" in in_terminal(session.inspect.plan)


def test_profile_shows_steps(session: ps.Session) -> None:
    profile = seen_by(session, ps.Profile())
    assert {"Exp", "Neg", "numpy"} <= set(Cells(profile._repr_html_()).cells)
    assert in_terminal(profile).startswith("1 runs, ")


def test_ranges_show_values(session: ps.Session) -> None:
    ranges = seen_by(session, ps.Ranges())
    assert {"x", "a", "y", "3"} <= set(Cells(ranges._repr_html_()).cells)
    assert "x      0         3" in in_terminal(ranges)


def test_trace_shows_steps(session: ps.Session) -> None:
    trace = seen_by(session, ps.Trace())
    assert {"Exp", "Neg", "numpy", "1"} <= set(Cells(trace._repr_html_()).cells)
    assert in_terminal(trace).startswith("Trace(1 runs, 2 steps)")
