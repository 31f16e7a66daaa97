"""Report of what was quantized and why, as data and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from penstock.core.types import JsonObject
from penstock.ir.tables import html_table
from penstock.ops.internal.fused import operation_name
from penstock.quantizing.costs import by_node
from penstock.quantizing.layers import ROUNDING, STORING, LayerType, QuantizableLayer
from penstock.quantizing.measuring import step_seconds_of
from penstock.quantizing.record import Point
from penstock.quantizing.search import Search
from penstock.session.session import Session
from penstock.tuning.output_error import OutputError

_FASTER = 0.97  # of the time, from which on a type is faster


def describe_search(
    search: Search,
    point: Point,
    session: Session,
    errors: Mapping[str, OutputError],
    seconds: Sequence[float],
) -> JsonObject:
    """The report of a search that has chosen ``point``. ``session`` runs the written model;
    ``errors`` are the errors of its outputs on the held-out samples, ``seconds`` the times of a run
    of this model and of the original."""
    form = search.form(point.choice)
    after = by_node(search.graph, search.layers, form, step_seconds_of(session, search.sample))
    before = search.seconds["float32"].layers if search.seconds else {}
    goal = search.goal
    layers = [
        {
            "name": layer.name,
            "operation": operation_name(layer.node),
            "weights": list(layer.dims),
            "type": point.choice.get(layer.name, "float32"),
            "ms_before": before.get(layer.name, 0.0) * 1e3,
            "ms_after": after.layers.get(layer.name, 0.0) * 1e3,
            "bytes_before": round(layer.nbytes("float32")),
            "bytes_after": round(layer.nbytes(point.choice.get(layer.name, "float32"))),
            "error": _error(search, layer, point),
            "why": _reason(search, layer, point),
        }
        for layer in search.layers
    ]
    return {
        "model": search.original.model.path or search.model.entry,
        "goal": {"max_error": goal.max_error, "time": goal.time, "size": goal.size},
        "samples": {"chosen_by": len(search.chosen_by), "held_out": len(search.held)},
        "ms_before": seconds[1] * 1e3,
        "ms_after": seconds[0] * 1e3,
        "time": seconds[0] / seconds[1],
        "size": point.size,
        "error": _finite(point.held_out),
        "error_chosen_by": _finite(point.error),
        "error_limit": _finite(point.limit),
        "outputs": [
            {"name": name, "rms": _finite(own.rms), "largest": _finite(own.largest)}
            for name, own in errors.items()
        ],
        "clipping": search.record.clipping,
        "clippings": {way: _finite(error) for way, error in search.record.clippings.items()},
        "learned": {
            "layers": len({*search.record.learned} & {*point.choice.items()}),
            "seconds": search.record.learning_seconds,
        },
        "layers": layers,
        "points": [_point(p, p.choice == point.choice) for p in search.record.points],
    }


def _point(point: Point, chosen: bool) -> JsonObject:
    return {
        "note": point.note,
        "time": point.time,
        "size": point.size,
        "error": _finite(point.error),
        "error_held_out": _finite(point.held_out),
        "error_limit": _finite(point.limit),
        "chosen": chosen,
    }


def _error(search: Search, layer: QuantizableLayer, point: Point) -> float | None:
    """The error of the outputs if only this layer has its type, if it was measured."""
    squared = search.record.errors.get(layer.name, {}).get(point.choice.get(layer.name, "float32"))
    return None if squared is None else _finite(squared**0.5)


def _finite(error: float) -> float | None:
    """An error as JSON can have it; None if it is infinite, as where outputs are NaN."""
    return error if math.isfinite(error) else None


def error_text(error: float | None) -> str:
    """An error of a report as people read it."""
    return "infinite" if error is None else f"{error:.3g}"


def _reason(search: Search, layer: QuantizableLayer, point: Point) -> str:
    """Why a layer has its type."""
    type_: LayerType = point.choice.get(layer.name, "float32")
    before = search.seconds["float32"].layers.get(layer.name, 0.0) if search.seconds else 0.0
    times = {
        other: search.seconds[other].layers.get(layer.name, 0.0)
        for other in layer.types
        if other not in ("float32", *STORING) and other in search.seconds
    }
    if type_ in STORING:
        codes = search.record.errors.get(layer.name, {}).get("weights8")
        if type_ == "weights8" or codes is None:
            return "smaller at the same speed"
        return f"smaller at the same speed; as weights8 it alone makes an error of {codes**0.5:.2g}"
    if type_ != "float32":
        type_ = "bfloat16" if type_ in ROUNDING else type_
        return f"{times.get(type_, 0.0) * 1e3:.3g} ms in place of {before * 1e3:.3g}"
    if not times:
        return "no kernel of fewer bits is available for it"
    # The reason is that of the form which would have paid most.
    best = min(times, key=times.__getitem__)
    if times[best] > _FASTER * before:
        return (
            f"fewer bits are no faster: {times[best] * 1e3:.3g} ms in place of {before * 1e3:.3g}"
        )
    squared = search.record.errors.get(layer.name, {}).get(best)
    if squared is not None:
        return f"as {best} it alone makes an error of {squared**0.5:.2g}"
    return "with it the model is no faster, or its error is too large"


def report_of_layers(document: JsonObject) -> str:
    """The page of a report."""
    title = escape(f"{document['model']}, quantized")
    facts = [f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _facts(document)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"{_POLICY}<style>{_STYLE}</style><h1>{title}</h1><table>{''.join(facts)}</table>"
        f"<h2>Error and time</h2>{curve(document)}{_points(document)}"
        f"<h2>Outputs</h2>{_outputs(document)}<h2>Layers</h2>{_layers(document)}</html>\n"
    )


def _facts(document: JsonObject) -> list[tuple[str, str]]:
    """The figures of the whole model."""
    bound, counts = document["goal"]["max_error"], document["samples"]
    learned = document["learned"]
    shares = f"{document['time']:.3f} of the original's"
    milliseconds = f"{document['ms_after']:.3g} ms in place of {document['ms_before']:.3g}"
    allowed = "" if bound is None else f", allowed are {bound:g}"
    return [
        ("time of a run", f"{shares}, {milliseconds}"),
        ("bytes of weights", f"{document['size']:.3f} of the original's"),
        ("error on samples held out", error_text(document["error"])),
        ("limit of a further sample's", f"{error_text(document['error_limit'])}{allowed}"),
        ("samples", f"{counts['chosen_by']} to choose by, {counts['held_out']} held out"),
        ("ranges clipped by", document["clipping"] or "nothing: no layer has static ranges"),
        ("roundings learned", f"of {learned['layers']} layers, in {learned['seconds']:.1f} s"),
    ]


def _outputs(document: JsonObject) -> str:
    return html_table(
        ("output", "root mean square", "largest difference"),
        [(o["name"], error_text(o["rms"]), error_text(o["largest"])) for o in document["outputs"]],
    )


def _layers(document: JsonObject) -> str:
    titles = (
        *("layer", "operation", "weights", "type"),
        *("ms before", "ms after", "error alone", "why"),
    )
    rows = [
        (
            *(own["name"], own["operation"], "x".join(map(str, own["weights"])), own["type"]),
            *(f"{own['ms_before']:.3f}", f"{own['ms_after']:.3f}"),
            *("" if own["error"] is None else f"{own['error']:.2g}", own["why"]),
        )
        for own in document["layers"]
    ]
    return html_table(titles, rows)


def _points(document: JsonObject) -> str:
    rows = [
        (
            p["note"] + (" (chosen)" if p["chosen"] else ""),
            *(f"{p['time']:.3f}", f"{p['size']:.3f}"),
            *(error_text(p[name]) for name in ("error", "error_held_out", "error_limit")),
        )
        for p in document["points"]
    ]
    return html_table(("what was tried", "time", "size", "error", "held out", "limit"), rows)


_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:70em}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{text-align:left;padding:.2em .8em .2em 0;border-bottom:1px solid #ccc;"
    "vertical-align:top}svg text{font-size:11px}"
)


_WIDTH, _HEIGHT, _EDGE = 520, 260, 40


def curve(document: JsonObject) -> str:
    """The points that were tried, as a picture: time to the right, the limit of errors up, and the
    bound as a line."""
    # Choices with NaN outputs are not drawn.
    placed = [p for p in document["points"] if p["error_limit"] is not None]
    points = [(p["time"], p["error_limit"], p) for p in placed]
    bound = document["goal"]["max_error"]
    most_error = max([e for _, e, _ in points] + [bound or 0.0, 1e-9]) * 1.1
    most_time = max([t for t, _, _ in points] + [1.0]) * 1.05

    def at(time: float, error: float) -> tuple[float, float]:
        x = _EDGE + time / most_time * (_WIDTH - 2 * _EDGE)
        return x, _HEIGHT - _EDGE - error / most_error * (_HEIGHT - 2 * _EDGE)

    x0, y0 = at(0, 0)
    x1, y1 = at(most_time, most_error)
    parts = [
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#555"/>',
        f'<text x="{x1 - 110:.0f}" y="{y0 + 28}">time, original 1</text>',
        f'<text x="{x0 - 30:.0f}" y="{y1 - 8:.0f}">error, up to {most_error:.3g}</text>',
    ]
    if bound is not None:
        y = at(0, bound)[1]
        parts.append(f'<path d="M{x0} {y:.1f}H{x1}" stroke="#b00" stroke-dasharray="4"/>')
    x = at(1, 0)[0]
    parts.append(f'<path d="M{x:.1f} {y0}V{y1}" stroke="#999" stroke-dasharray="2"/>')
    for time, error, p in points:
        cx, cy = at(time, error)
        fill = "#06c" if p["chosen"] else "#aaa"
        title = escape(f"{p['note']}: time {time:.3f}, error {error:.3g}")
        parts.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{fill}">'
            f"<title>{title}</title></circle>"
        )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
