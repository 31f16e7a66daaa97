"""Static schedules as text, as data classes, and as Gantt charts in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from penstock.algorithms.ordering import ranks
from penstock.algorithms.records import dataclass
from penstock.inspect.explain import block_names
from penstock.ops.internal.fused import operation_name
from penstock.plan.plan import Step, StepTable
from penstock.plan.streams import StreamSchedules


@dataclass(frozen=True, slots=True)
class Bar:
    """A step on its stream. Times are simulated, in seconds from the beginning of the block.
    ``rank`` is the time of the longest chain of steps that follow. ``waits`` and ``emits`` are
    signals of the block."""

    number: int
    operation: str
    origin: str
    start: float
    finish: float
    rank: float
    waits: tuple[int, ...]
    emits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """The schedule of a block.

    ``streams`` has the steps of each stream, ``devices`` the device of each, "" for the host.
    ``begin`` are the streams that begin with stream 0, ``end`` the signals that stream 0 waits for
    at the end. ``serial`` is the time of the block on one stream, in seconds.
    """

    name: str
    streams: tuple[tuple[Bar, ...], ...]
    devices: tuple[str, ...]
    signals: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    makespan: float
    serial: float

    @property
    def title(self) -> str:
        """A heading for the chart."""
        streams, signals = len(self.streams), self.signals
        return (
            f"{self.name}: {streams} stream{'s' * (streams != 1)}, "
            f"{signals} signal{'s' * (signals != 1)}, {microseconds(self.makespan)} simulated, "
            f"{microseconds(self.serial)} on one stream"
        )


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def charts(plan: StepTable, schedules: StreamSchedules) -> list[Chart]:
    """Charts of the plan's outermost block, and of inner blocks that have streams of their own."""
    return list(_charts(plan.steps, f"plan {plan.name!r}", schedules))


def _charts(steps: Sequence[Step], name: str, schedules: StreamSchedules) -> Iterator[Chart]:
    block = schedules.of(steps)
    schedule = block.schedule
    cost = [schedules.seconds(steps[i]) for i in block.nodes]
    rank = ranks(block.dag, cost)
    number = {k: n for n, k in enumerate(schedule.order, 1)}

    def bar(k: int) -> Bar:
        node, times = steps[block.nodes[k]].node, (block.start[k], block.finish[k], rank[k])
        what, signals = operation_name(node), (schedule.waits[k], schedule.emits[k])
        return Bar(number[k], what, node.origin or node.name, *times, *signals)

    streams = tuple([tuple(map(bar, program)) for program in schedule.programs])
    names = schedules.names
    devices = tuple([names[d] for d in schedule.device_of])
    signals = schedule.n_signals, schedule.begin, schedule.end
    serial = sum(map(schedules.seconds, steps))
    yield Chart(name, streams, devices, *signals, block.makespan, serial)
    for k in schedule.order:
        step = steps[block.nodes[k]]
        if step.control and schedules.expands(step):
            for role, inner in zip(block_names(step), step.blocks, strict=True):
                yield from _charts(inner.steps, f"{role} of {step.node.label}", schedules)


def format_charts(charts: Sequence[Chart]) -> str:
    """A line for each step, listed under its stream."""
    lines = []
    for chart in charts:
        lines.append(chart.title)
        for s, bars in enumerate(chart.streams):
            device = f" on {chart.devices[s]}" if chart.devices[s] else ""
            begin = ", begins with stream 0" if s in chart.begin else ""
            lines.append(f"  stream {s}{device}{begin}")
            for bar in bars:
                waits = "".join(f" ?{k}" for k in bar.waits)
                emits = "".join(f" !{k}" for k in bar.emits)
                times = f"{bar.start * 1e6:10.1f} ..{bar.finish * 1e6:10.1f} us"
                rank = f"rank {bar.rank * 1e6:.1f}"
                step = f"{bar.operation}{waits}{emits}  # {bar.origin}"
                lines.append(f"    {bar.number:>4} {times}  {rank:<14} {step}")
        if chart.end:
            lines.append(f"  stream 0 waits{''.join(f' ?{k}' for k in chart.end)} at the end")
    return "\n".join(lines) + "\n"


# SVG.

_LEFT, _TOP, _LANE, _BAR, _GAP = 110, 34, 30, 20, 24
_FEWEST_WIDE, _MOST_WIDE = 900, 40_000
# Width of the median bar: about that of its label.
_MEDIAN_BAR = 46
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")


def draw_charts(charts: Sequence[Chart]) -> str:
    """An SVG document: a lane for each stream, a bar for each step, an arrow for each wait, from
    where the signal is emitted. Every bar has a tooltip, short ones no label."""
    scale = _scale(charts)
    width = _LEFT + max((chart.makespan for chart in charts), default=0.0) * scale + 40
    lines: list[str] = []
    y = 10
    colours: dict[str, str] = {}
    for chart in charts:
        lines += _chart(chart, y, scale, width, colours)
        y += _TOP + _LANE * len(chart.streams) + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y}" '
        f'viewBox="0 0 {width:.0f} {y}" font-family="sans-serif" font-size="11">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#333"/></marker></defs>'
    )
    ground = f'<rect width="{width:.0f}" height="{y}" fill="white"/>'
    return "\n".join([head, marker, ground, *lines, "</svg>"]) + "\n"


def _scale(charts: Sequence[Chart]) -> float:
    """Pixels per second."""
    longest = max((chart.makespan for chart in charts), default=0.0)
    if not longest:
        return 1.0
    bars = [bar for chart in charts for stream in chart.streams for bar in stream]
    median = sorted(bar.finish - bar.start for bar in bars)[len(bars) // 2]
    width = _MEDIAN_BAR / median * longest if median else _FEWEST_WIDE
    return min(max(width, _FEWEST_WIDE), _MOST_WIDE) / longest


def _chart(
    chart: Chart, top: int, scale: float, width: float, colours: dict[str, str]
) -> Iterator[str]:
    yield f'<text x="10" y="{top + 12}" font-weight="bold">{escape(chart.title)}</text>'
    emitted: dict[int, tuple[float, float]] = {}
    for s, bars in enumerate(chart.streams):
        y = top + _TOP + _LANE * s
        name = f"stream {s}" + (f", {chart.devices[s]}" if chart.devices[s] else "")
        yield f'<text x="10" y="{y + 14}" fill="#333">{escape(name)}</text>'
        middle = y + _BAR / 2
        yield f'<path d="M{_LEFT} {middle} H{width - 20:.0f}" stroke="#ddd"/>'
        for bar in bars:
            colour = colours.setdefault(bar.operation, _COLOURS[len(colours) % len(_COLOURS)])
            yield from _bar(bar, y, scale, colour)
            emitted |= dict.fromkeys(bar.emits, (_LEFT + bar.finish * scale, middle))
    for s, bars in enumerate(chart.streams):
        for bar in bars:
            end = _LEFT + bar.start * scale, top + _TOP + _LANE * s + _BAR / 2
            yield from [_arrow(emitted[k], end, k) for k in bar.waits]


def _bar(bar: Bar, y: float, scale: float, colour: str) -> Iterator[str]:
    label = f"{bar.number} {bar.operation}"
    x, wide = _LEFT + bar.start * scale, max((bar.finish - bar.start) * scale, 1.0)
    times = f"{microseconds(bar.start)} to {microseconds(bar.finish)}"
    about = f"{label}, {bar.origin}: {times}, rank {microseconds(bar.rank)}"
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" fill="{colour}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(about)}</title></rect>'
    )
    room = int(wide / 6.2)
    if room < len(label):
        label = str(bar.number) if room >= len(str(bar.number)) else ""
    if label:
        yield (
            f'<text x="{x + 3:.1f}" y="{y + 14}" fill="white" pointer-events="none">'
            f"{escape(label)}</text>"
        )


def _arrow(begin: tuple[float, float], end: tuple[float, float], signal: int) -> str:
    (x, y), (u, v) = begin, end
    bend = max((u - x) / 2, 8.0)
    return (
        f'<path d="M{x:.1f} {y:.1f} C{x + bend:.1f} {y:.1f} {u - bend:.1f} {v:.1f} {u:.1f} {v:.1f}"'
        f' fill="none" stroke="#333" stroke-width="0.8" marker-end="url(#head)">'
        f"<title>signal {signal}</title></path>"
    )
