"""Gantt charts in SVG: a lane for each stream, a bar for each step.

A chart that is wider than a page goes on in further rows, each with its own axis of time; a bar on
the border of two rows has a part in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from penstock.core.records import dataclass
from penstock.inspect.gantt_chart import Bar, Chart, microseconds

_LEFT, _RIGHT, _TOP, _LANE, _BAR, _GAP = 110, 20, 44, 30, 20, 24
_FEWEST_WIDE, _MOST_WIDE = 900, 40_000
# Width of the median bar: about that of its label.
_MEDIAN_BAR = 46
_TICK_PIXELS = 110
_LETTER = 6.2
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
_MARKER = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>'
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A part of a chart, from ``begin`` to ``end`` in seconds, drawn from ``top`` down."""

    chart: Chart
    begin: float
    end: float
    top: float
    scale: float

    def x(self, time: float) -> float:
        return _LEFT + (time - self.begin) * self.scale

    def lane(self, stream: int) -> float:
        return self.top + _TOP + _LANE * stream

    def holds(self, time: float) -> bool:
        # A time between two rows is in the later one; the end of the chart has no later row.
        return self.begin <= time < self.end or (time == self.end == self.chart.makespan)


def draw_charts(charts: Sequence[Chart], wrap: float | None = None) -> str:
    """An SVG document: a lane for each stream, a bar for each step, an arrow for each wait, from
    where the signal is emitted, an axis of time, and the colour of each operation. Every bar has a
    tooltip, short ones no label. Rows have up to ``wrap`` pixels."""
    scale = _scale(charts)
    longest = max((chart.makespan for chart in charts), default=0.0) * scale
    inner = longest if wrap is None else min(longest, max(wrap - _LEFT - _RIGHT, _TICK_PIXELS))
    width = max(_LEFT + inner + _RIGHT, 400)
    operations = dict.fromkeys(bar.operation for c in charts for s in c.streams for bar in s)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(operations)}
    lines, y = _legend(colours, width)
    for chart in charts:
        rows = []
        for begin, end in _windows(chart.makespan, inner / scale):
            rows.append(_Row(chart, begin, end, y, scale))
            y += _TOP + _LANE * len(chart.streams) + _GAP
        for row in rows:
            lines += _row(row, width, colours)
        lines += _arrows(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {width:.0f} {y:.0f}" font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{width:.0f}" height="{y:.0f}" fill="white"/>'
    return "\n".join([head, _MARKER, ground, *lines, "</svg>"]) + "\n"


def _scale(charts: Sequence[Chart]) -> float:
    """Pixels per second."""
    longest = max((chart.makespan for chart in charts), default=0.0)
    if not longest:
        return 1.0
    bars = [bar for chart in charts for stream in chart.streams for bar in stream]
    median = sorted(bar.finish - bar.start for bar in bars)[len(bars) // 2]
    width = _MEDIAN_BAR / median * longest if median else _FEWEST_WIDE
    return min(max(width, _FEWEST_WIDE), _MOST_WIDE) / longest


def _windows(makespan: float, most: float) -> list[tuple[float, float]]:
    """The times of rows of up to ``most`` seconds, in seconds."""
    # A rounding error is not worth a row.
    count = max(1, ceil(makespan / most - 1e-9)) if most else 1
    ends = [*[(i + 1) * most for i in range(count - 1)], makespan]
    return list(zip([0.0, *ends], ends, strict=False))


def _legend(colours: dict[str, str], width: float) -> tuple[list[str], float]:
    """A swatch for each operation, in as many lines as they need, and the height of these."""
    lines = []
    x, y = 10.0, 10.0
    for name, colour in colours.items():
        wide = 24 + _LETTER * len(name)
        if x + wide > width and x > 10:
            x, y = 10.0, y + 18
        lines.append(
            f'<path d="M{x:.0f} {y:.0f} h11 v11 h-11 z" fill="{colour}"/>'
            f'<text x="{x + 15:.0f}" y="{y + 10:.0f}" class="legend">{escape(name)}</text>'
        )
        x += wide
    return lines, y + (26 if colours else 0)


def _row(row: _Row, width: float, colours: dict[str, str]) -> Iterator[str]:
    chart, y = row.chart, row.top
    more = f" (from {microseconds(row.begin)})" if row.begin else ""
    yield f'<text x="10" y="{y + 12}" font-weight="bold">{escape(chart.title)}{more}</text>'
    bottom = row.lane(len(chart.streams)) - _LANE + _BAR
    yield from _axis(row, y + 36, bottom)
    for s, bars in enumerate(chart.streams):
        y = row.lane(s)
        name = f"stream {s}" + (f", {chart.devices[s]}" if chart.devices[s] else "")
        yield f'<text x="10" y="{y + 14}" fill="#333">{escape(name)}</text>'
        yield f'<path d="M{_LEFT} {y + _BAR / 2} H{width - _RIGHT:.0f}" stroke="#ddd"/>'
        for bar in bars:
            overlaps = bar.start < row.end and bar.finish > row.begin
            if overlaps or row.holds(bar.start):
                yield from _bar(bar, row, y, colours[bar.operation])


def _axis(row: _Row, y: float, bottom: float) -> Iterator[str]:
    """Ticks at round times, with lines through the lanes."""
    span = row.end - row.begin
    if span <= 0:
        return
    step = _round_up(span / max(1.0, span * row.scale / _TICK_PIXELS))
    # A tick at the very end is kept where rounding puts it beyond.
    for i in range(ceil(row.begin / step), floor(row.end / step + 1e-9) + 1):
        x = row.x(i * step)
        text = f"{float(f'{i * step * 1e6:.6g}'):g} us"
        yield f'<path d="M{x:.1f} {y} V{bottom:.1f}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{y - 4}" fill="#666" text-anchor="middle">{text}</text>'


def _round_up(seconds: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(seconds))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= seconds * (1 - 1e-9))


def _bar(bar: Bar, row: _Row, y: float, colour: str) -> Iterator[str]:
    label = f"{bar.number} {bar.operation}"
    begin, end = max(bar.start, row.begin), min(bar.finish, row.end)
    # A step of no time would not be seen.
    x, wide = row.x(begin), max((end - begin) * row.scale, 1.0)
    times = f"{microseconds(bar.start)} to {microseconds(bar.finish)}"
    about = f"{label}, {bar.origin}: {times}, rank {microseconds(bar.rank)}"
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" fill="{colour}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(about)}</title></rect>'
    )
    room = int(wide / _LETTER)
    if room < len(label):
        label = str(bar.number) if room >= len(str(bar.number)) else ""
    if label:
        yield (
            f'<text x="{x + 3:.1f}" y="{y + 14}" fill="white" pointer-events="none">'
            f"{escape(label)}</text>"
        )


def _arrows(rows: Sequence[_Row]) -> Iterator[str]:
    """An arrow for each wait; one that leads to another row is a label at both ends."""
    if not rows:
        return
    streams = rows[0].chart.streams
    emitted = {
        k: (bar.finish, s) for s, bars in enumerate(streams) for bar in bars for k in bar.emits
    }
    for s, bars in enumerate(streams):
        for bar in bars:
            for k in bar.waits:
                finish, stream = emitted[k]
                source, target = _row_of(rows, finish), _row_of(rows, bar.start)
                begin = source.x(finish), source.lane(stream) + _BAR / 2
                end = target.x(bar.start), target.lane(s) + _BAR / 2
                if source is target:
                    yield _arrow(begin, end, k)
                else:
                    yield _mark(begin, f"{k}\u2192", "end", k)
                    yield _mark(end, f"\u2192{k}", "start", k)


def _row_of(rows: Sequence[_Row], time: float) -> _Row:
    return next((row for row in rows if row.holds(time)), rows[-1])


def _mark(at: tuple[float, float], text: str, anchor: str, signal: int) -> str:
    x, y = at
    return (
        f'<text x="{x:.1f}" y="{y + 19:.1f}" fill="#333" font-size="9" text-anchor="{anchor}" '
        f'class="signal">{text}<title>signal {signal}</title></text>'
    )


def _arrow(begin: tuple[float, float], end: tuple[float, float], signal: int) -> str:
    (x, y), (u, v) = begin, end
    bend = max((u - x) / 2, 8.0)
    return (
        f'<path d="M{x:.1f} {y:.1f} C{x + bend:.1f} {y:.1f} {u - bend:.1f} {v:.1f} {u:.1f} {v:.1f}"'
        f' fill="none" stroke="#333" stroke-width="0.8" marker-end="url(#head)">'
        f"<title>signal {signal}</title></path>"
    )
