"""Random recurrent layers and cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from penstock.ops.internal.recurrence import RECURRENCE
from tests.support.draws import CODES, Draw, Source, draws, short_name
from tests.support.error_bounds import Rounded


def _step(cell: str, parts: Sequence[Rounded], h: Rounded, c: Rounded | None, **more: Any) -> Any:
    """The next state and cell: ``parts`` are the sums of each gate, of the state apart for what a
    GRU resets behind its product."""
    if cell == "RNN":
        return parts[0].tanh(), None
    if cell == "GRU":
        z, r = parts[0].sigmoid(), parts[1].sigmoid()
        new = more["new"](r).tanh()
        return (1.0 - z) * new + z * h, None
    assert c is not None
    peep = more.get("peep", (0.0, 0.0, 0.0))
    i, f = (parts[0] + c * peep[0]).sigmoid(), (parts[2] + c * peep[2]).sigmoid()
    c, clip = f * c + i * parts[3].tanh(), more.get("clip", 0.0) or np.inf
    c = Rounded(np.clip(c.value, -clip, clip), c.error, c.dtype)
    return (parts[1] + c * peep[1]).sigmoid() * c.tanh(), c


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _layer(
    cell: str,
    x: Rounded,
    w: Rounded,
    r: Rounded,
    bias: np.ndarray,
    h: Rounded,
    c: Rounded,
    lengths: np.ndarray,
    *,
    peep: Any = (0.0, 0.0, 0.0),
    reverse: bool = False,
    behind: bool = False,
    state_error: float = 0.0,
    clip: float = 0.0,
) -> tuple[list[Rounded], Rounded, Rounded]:
    """The states of all steps of one direction, each [batch, units]; the last state and cell. Rows
    whose sequence has ended keep their states, and have zeros. ``state_error`` is what a state is
    changed by before it is multiplied."""
    steps, batch, units = *x.value.shape[:2], r.value.shape[-1]
    gates = GATES[cell]
    own, of_state = bias[: gates * units], bias[gates * units :]
    part = lambda a, i: a[..., i * units : (i + 1) * units]  # noqa: E731
    states = [Rounded.exact(np.zeros((batch, units)), x.dtype)] * steps
    for step in range(steps):
        at = lengths - 1 - step if reverse else np.full(batch, step)
        running = (step < lengths)[:, None]
        rows = x[np.clip(at, 0, steps - 1), np.arange(batch)]
        read = h.inexact(state_error)
        a, b = rows @ w.map(np.transpose) + own, read @ r.map(np.transpose) + of_state
        parts = [part(a, i) + part(b, i) for i in range(gates)]

        def new(reset: Rounded, a: Any = a, b: Any = b, h: Rounded = read) -> Rounded:
            if behind:
                return part(a, 2) + reset * part(b, 2)
            product = (reset * h) @ r.map(np.transpose)[:, 2 * units :]
            return part(a, 2) + (product + of_state[2 * units :])

        next_h, next_c = _step(cell, parts, h, c, new=new, peep=peep, clip=clip)
        h = _chosen_rows(running, next_h, h)
        c = c if next_c is None else _chosen_rows(running, next_c, c)
        for row in range(batch):
            if running[row]:
                place = at[row]
                keep = np.arange(batch)[:, None] == row
                states[place] = _chosen_rows(keep, h, states[place])
    return states, h, c


def _chosen_rows(mask: np.ndarray, a: Rounded, b: Rounded) -> Rounded:
    value, error = np.where(mask, a.value, b.value), np.where(mask, a.error, b.error)
    return Rounded(value, error, a.dtype)


def _stacked(parts: Sequence[Rounded], axis: int) -> Rounded:
    return Rounded(
        np.stack([p.value for p in parts], axis),
        np.stack([p.error for p in parts], axis),
        parts[0].dtype,
    )


@draws("GRU LSTM RNN tflite.Lstm")
def _recurrent(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    cell = name.upper()
    steps, batch, width, units = rng.size(7), rng.size(17), rng.size(33), rng.size(65)
    directions, gates = 1 if domain else rng.pick(1, 1, 2), GATES[cell]
    direction = "bidirectional" if directions == 2 else rng.pick("forward", "reverse")
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    w = normal(directions, gates * units, width) / np.float32(math.sqrt(width))
    r = normal(directions, gates * units, units) / np.float32(math.sqrt(units))
    given = lambda *dims: normal(*dims) if domain or rng.chance(0.5) else None  # noqa: E731
    some = rng.chance(0.4) and not domain
    lengths = rng.integers(0, steps + 1, batch).astype(np.int32) if some else None
    inputs = [normal(steps, batch, width), w, r, given(directions, 2 * gates * units), lengths]
    inputs.append(given(directions, batch, units))
    if cell == "LSTM":
        inputs += [given(directions, batch, units), given(directions, 3 * units)]
    attrs: dict[str, Any] = {"hidden_size": units, "direction": direction}
    clip = rng.pick(0.0, 0.1, 0.7) if domain else 0.0
    attrs |= {"cell_clip": clip, "proj_clip": 0.0, "activation": 4} if domain else {}
    behind = cell == "GRU" and rng.chance(0.5)
    attrs |= {"linear_before_reset": 1} if behind else {}
    outputs = 3 if cell == "LSTM" else 2

    def bound(draw: Draw) -> list[Rounded | None]:
        zeros = np.zeros((directions, batch, units))
        read = lambda i, other: draw.read(i).value if _has(draw, i) else other  # noqa: E731
        bias, h, c = read(3, np.zeros((directions, 2 * gates * units))), read(5, zeros), zeros
        peep = np.zeros((directions, 3 * units))
        if cell == "LSTM":
            c, peep = read(6, zeros), read(7, peep)
        ends = np.full(batch, steps) if draw.inputs[4] is None else draw.inputs[4]
        results = [
            _layer(
                *(cell, draw.read(0), draw.read(1)[d], draw.read(2)[d], bias[d]),
                *(draw.read(0).like(h[d]), draw.read(0).like(c[d]), ends),
                peep=np.split(peep[d], 3),
                reverse=d == 1 or direction == "reverse",
                behind=behind,
                clip=clip,
            )
            for d in range(directions)
        ]
        y = _stacked([_stacked(states, 0) for states, _, _ in results], 1)
        return [y, *[_stacked([x[i] for x in results], 0) for i in range(1, outputs)]]

    constants = [i for i in (1, 2, 3, 7) if i < len(inputs) and inputs[i] is not None]
    options: dict[str, Any] = {"domain": domain, "version": 1} if domain else {}
    return Draw(name, inputs, attrs, bound, constants, outputs, **options)


@draws("tflite.DynamicRangeDense")
def _dynamic_range_dense(rng: Source, full_name: str) -> Draw:
    """Codes, their sums and what is made of them are the same to the bit."""
    k, n = rng.size(200), rng.size(150)
    x = rng.normal(rng.pick(0.0, 2.0), 1, (*rng.dims(1, 9), k)).astype(np.float32)
    x[0] = x[0] * rng.pick(0, 1)
    scales = np.asarray(rng.uniform(0.001, 0.1, rng.pick((1,), (n,))), np.float32)
    inputs = [x, rng.numbers((n, k), "int8"), scales]
    inputs += [rng.normal(0, 1, n).astype(np.float32)] if rng.chance(0.6) else []
    attrs: dict[str, Any] = {"asymmetric": rng.pick(0, 1)}
    attrs |= rng.pick({}, {"limits": [0.0, math.inf]}, {"limits": [-1.0, 1.0]})
    constants = [*range(1, len(inputs))]
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("DynamicRangeDense", inputs, attrs, None, constants, **options)


@draws("tflite.IntegerLstm")
def _integer_lstm(rng: Source, full_name: str) -> Draw:
    """Sums of all sizes, up to gates that saturate; the result is the same to the bit."""
    steps, batch, width, units = rng.size(7), rng.size(17), rng.size(150), rng.size(90)
    layout, bits = rng.pick(0, 1), rng.pick(0, 3, 4, 6)
    dims = (batch, steps, width) if layout else (steps, batch, width)
    inputs = [rng.numbers(dims, "int8")]
    inputs += [rng.numbers((4 * units, size), "int8") for size in (width, units)]
    inputs += [rng.integers(-30000, 30000, 4 * units, np.int32) for _ in range(2)]
    inputs += [rng.numbers((batch, units), dtype) for dtype in ("int8", "int16")]
    scales = 2.0 ** rng.uniform(-9, 1, 8)
    attrs = {
        "hidden_size": units,
        "direction": rng.pick("forward", "reverse"),
        "layout": layout,
        "scales": [*scales.tolist(), 2.0 ** float(rng.uniform(-25, -20, ()))],
        "zero": rng.pick(0, -128, 5),
        "cell_bits": bits,
        "cell_clip": rng.pick(0, 20000),
    }
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("IntegerLstm", inputs, attrs, None, [1, 2, 3, 4], 3, **options)


@draws("tflite.IntegerSvdf")
def _integer_svdf(rng: Source, full_name: str) -> Draw:
    """Sums of all sizes, up to memories and codes that saturate, and sums that wrap."""
    batch, features, units, rank = rng.size(17), rng.size(150), rng.size(150), rng.pick(1, 2, 3)
    steps, filters = rng.size(20), rank * units
    inputs = [rng.numbers((batch, features), "int8"), rng.numbers((filters, features), "int8")]
    inputs += [rng.numbers((filters, steps), "int16")]
    inputs += [rng.integers(-30000, 30000, n, np.int32) for n in (filters, units)]
    inputs += [rng.numbers((batch, filters * steps), "int16")]
    scales = [2.0 ** float(rng.uniform(low, high, ())) for low, high in ((-12, 3), (-32, -16))]
    attrs = {"scales": scales, "zero": rng.pick(0, -128, 5)}
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("IntegerSvdf", inputs, attrs, None, [1, 2, 3, 4], 2, **options)


def _has(draw: Draw, i: int) -> bool:
    return i < len(draw.inputs) and draw.inputs[i] is not None


@draws("com.microsoft.DynamicQuantizeLSTM")
def _codes_lstm(rng: Source, full_name: str) -> Draw:
    steps, batch, width, units = rng.size(5), rng.size(9), rng.size(33), rng.size(33)
    dtype = rng.pick(*CODES)
    weights, scales, zeros = [], [], []
    for k in (width, units):
        weights.append(rng.numbers((1, k, 4 * units), dtype))
        scales.append(rng.uniform(0.001, 0.003, (1, 4 * units)).astype(np.float32))
        zeros.append(rng.numbers((1, 4 * units), dtype))
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    x, states = normal(steps, batch, width), [normal(1, batch, units) for _ in range(2)]
    inputs = [x, *weights, normal(1, 8 * units), None, *states, None]
    inputs += [scales[0], zeros[0], scales[1], zeros[1]]

    def bound(draw: Draw) -> list[Rounded | None]:
        # Rows of x, and all states of a step, are rounded to one of 255 codes between their least and
        # their highest, of which 0 is one: by half of a code, one more as that is rounded itself.
        w, r = (
            (weights[i].astype(np.float64) - zeros[i]) * scales[i].astype(np.float64)
            for i in range(2)
        )
        exact = draw.read(0).like
        spread = max(float(x.max(initial=0)) - float(x.min(initial=0)), 1e-9)
        most = 2 * max(1.0, float(np.abs(states[0]).max()))
        states_and_ends = _layer(
            *("LSTM", draw.read(0).inexact(spread / 255), exact(w[0].T), exact(r[0].T)),
            *(draw.inputs[3][0].astype(np.float64), exact(states[0][0]), exact(states[1][0])),
            np.full(batch, steps),
            state_error=most / 255,
        )
        every, h, c = states_and_ends
        return [_stacked([_stacked(every, 0)], 1), _stacked([h], 0), _stacked([c], 0)]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    attrs = {"hidden_size": units, "direction": "forward"}
    constants = [1, 2, 3, *range(8, 12)]
    return Draw("DynamicQuantizeLSTM", inputs, attrs, bound, constants, 3, **options)


@draws("penstock.Recurrence")
def _recurrence(rng: Source, name: str) -> Draw:
    cell, steps, batch, units = rng.pick(*GATES), rng.size(5), rng.size(17), rng.size(65)
    gates, behind = GATES[cell], rng.chance(0.5)
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    places = tuple(rng.permutation(gates).tolist())
    r = normal(1, gates * units, units) / np.float32(math.sqrt(units))
    bias = normal(1, 2 * gates * units) if rng.chance(0.5) else None
    inputs = [normal(steps, batch, gates * units), r, bias, None]
    inputs += [normal(batch, units) for _ in range(2 if cell == "LSTM" else 1)]
    attrs = {"cell": cell, "hidden_size": units, "places": places}
    attrs |= {"linear_before_reset": int(behind), "activations": ()}

    def bound(draw: Draw) -> list[Rounded | None]:
        order = np.concatenate([np.arange(units) + units * place for place in places])
        x, exact = draw.read(0).map(lambda a: a[..., order]), draw.read(0).like
        own = np.zeros(2 * gates * units) if bias is None else bias[0].astype(np.float64)
        h = exact(draw.inputs[4])
        c = exact(draw.inputs[5]) if cell == "LSTM" else h
        # The products are given: those with the identity have no error but of zeros.
        states, h, c = _layer(
            *(cell, x, exact(np.eye(gates * units)), draw.read(1)[0], own, h, c),
            np.full(batch, steps),
            behind=behind,
        )
        return [_stacked(states, 0), h, *([c] if cell == "LSTM" else [])]

    constants = [1] if bias is None else [1, 2]
    return Draw(RECURRENCE, inputs, attrs, bound, constants, 3 if cell == "LSTM" else 2)


@draws("penstock.LstmCell penstock.GruCell penstock.GruGates penstock.GruState")
def _cells(rng: Source, full_name: str) -> Draw:
    name, rows, units = short_name(full_name)[0], rng.size(5), rng.size(65)
    scale = rng.pick(0.1, 3.0, 1e4)
    gates = lambda n: (rng.normal(size=(rows, n * units)) * scale).astype(np.float32)  # noqa: E731
    state = rng.normal(size=(rows, units)).astype(np.float32)
    part = lambda x, i: x[:, i * units : (i + 1) * units]  # noqa: E731
    order = tuple(rng.permutation(4 if name == "LstmCell" else 3).tolist())
    if name == "LstmCell":

        def lstm(draw: Draw) -> list[Rounded | None]:
            i, f, o, n = (part(draw.read(0), place) for place in order)
            c = (f + 0.5).sigmoid() * draw.read(1) + i.sigmoid() * n.tanh()
            return [o.sigmoid() * c.tanh(), c]

        attrs = {"order": order, "forget_bias": 0.5}
        return Draw(LSTM_CELL, [gates(4), state], attrs, lstm, outputs=2, is_formula=True)
    if name == "GruCell":

        def gru(draw: Draw) -> list[Rounded | None]:
            (xz, xr, xn), (hz, hr, hn) = ([part(draw.read(i), p) for p in order] for i in (0, 1))
            new = (xn + (xr + hr).sigmoid() * hn).tanh()
            return [new + (xz + hz).sigmoid() * (draw.read(2) - new)]

        return Draw(GRU_CELL, [gates(3), gates(3), state], {"order": order}, gru, is_formula=True)
    if name == "GruGates":

        def resets(draw: Draw) -> list[Rounded | None]:
            hz, hr = (part(draw.read(0), p) for p in order[:2])
            xz, xr = (part(draw.read(2), p) for p in order[1:])
            return [(hz + xz).sigmoid(), (hr + xr).sigmoid() * draw.read(1)]

        attrs = {"order": (*order[:2], *order[1:])}
        return Draw(
            GRU_GATES, [gates(3), state, gates(3)], attrs, resets, outputs=2, is_formula=True
        )

    def update(draw: Draw) -> list[Rounded | None]:
        new = (draw.read(0) + part(draw.read(3), order[0])).tanh()
        return [new + draw.read(1) * (draw.read(2) - new)]

    z = rng.random((rows, units)).astype(np.float32)
    inputs = [gates(1), z, state, gates(3)]
    return Draw(GRU_STATE, inputs, {"order": order[:1]}, update, is_formula=True)
