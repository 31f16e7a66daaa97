"""Cells of recurrent layers in float32: LstmCell, GruCell, and GruGates with GruState."""

from __future__ import annotations

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.types import FLOAT32

_GATE = 6  # cost of a gate's element with its activation, in additions


def _row_ns(units: int, gates: int) -> float:
    """Return the nanoseconds of one row of the batch."""
    return rows_ns(units * gates * _GATE, rows=0.5)


@family("penstock.LstmCell", work=by_memory)
def lstm_cell(site: Site) -> NativeCall | None:
    """LstmCell."""
    cell = site.tensor(1)
    if cell.dtype != FLOAT32 or not cell.elements or None in site.node.outputs:
        return None
    units = cell.dims[-1]
    starts = [place * units for place in site.attr("order", ())]
    into, forget, output, new = starts
    arrays = Tensor(0), Tensor(1), site.result(0), site.result(1)
    words = (*arrays, units, into, forget, new, output, float(site.attr("forget_bias", 0.0)))
    return NativeCall("lstm_cell", words, cell.elements // units, _row_ns(units, 5))


@family("penstock.GruCell", work=by_memory)
def gru_cell(site: Site) -> NativeCall | None:
    """GruCell."""
    state = site.tensor(2)
    if state.dtype != FLOAT32 or not state.elements:
        return None
    units = state.dims[-1]
    starts = [place * units for place in site.attr("order", ())]
    words = (*map(Tensor, range(3)), site.result(), units, *starts)
    return NativeCall("gru_cell", words, state.elements // units, _row_ns(units, 3))


@family("penstock.GruGates", work=by_memory)
def gru_gates(site: Site) -> NativeCall | None:
    """GruGates."""
    h, state, x = (site.input(i) for i in range(3))
    if state is None or h is None or state.dtype != FLOAT32 or not state.elements:
        return None
    if None in site.node.outputs:
        return None
    units = state.dims[-1]
    starts = [place * units for place in site.attr("order", ())]
    starts += [0] * (4 - len(starts))
    arrays = Tensor(0), Tensor(1), None if x is None else Tensor(2), site.result(0), site.result(1)
    words = (*arrays, units, h.dims[-1], 0 if x is None else x.dims[-1], *starts)
    return NativeCall("gru_gates", words, state.elements // units, _row_ns(units, 2))


@family("penstock.GruState", work=by_memory)
def gru_state(site: Site) -> NativeCall | None:
    """GruState."""
    state, x = site.tensor(2), site.input(3)
    if state.dtype != FLOAT32 or not state.elements:
        return None
    units, (place,) = state.dims[-1], site.attr("order", (0,))
    arrays = *map(Tensor, range(3)), None if x is None else Tensor(3), site.result()
    words = (*arrays, units, 0 if x is None else x.dims[-1], place * units)
    return NativeCall("gru_state", words, state.elements // units, _row_ns(units, 1))
