"""Static schedules: a chart for each block with streams, as text, or drawn by ``gantt_svg``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from penstock.algorithms.ordering import ranks
from penstock.inspect.explain import block_names
from penstock.inspect.gantt_chart import Bar, Chart
from penstock.ops.internal.fused import operation_name
from penstock.plan.plan import Step, StepTable
from penstock.plan.streams import StreamSchedules


class Schedule(tuple[Chart, ...]):
    """The charts of a plan: of its outermost block, and of inner blocks that have streams of their
    own. As text it has a line for each step; notebooks show it as a drawing."""

    __slots__ = ()

    def to_svg(self, wrap: float | None = 1240) -> str:
        """A Gantt chart in SVG: a lane for each stream under an axis of time, a bar for each step
        in the colour of its operation, an arrow for each wait. What is wider than ``wrap`` pixels
        goes on in another row, unless that is None."""
        from penstock.inspect.gantt_svg import draw_charts

        return draw_charts(self, wrap)

    def to_html(self, wrap: float | None = 1240) -> str:
        """The drawing of ``to_svg`` as a page that needs nothing else."""
        title = escape(self[0].name if self else "schedule")
        head = f'<head><meta charset="utf-8"><title>{title}</title></head>'
        body = f"<body>\n{self.to_svg(wrap)}</body>"
        return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n{body}\n</html>\n'

    def _repr_html_(self) -> str:
        return f'<div style="overflow:auto">{self.to_svg()}</div>'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        return format_charts(self).rstrip("\n")


def charts(plan: StepTable, schedules: StreamSchedules, executor: str) -> Schedule:
    """Charts of the plan's outermost block, and of inner blocks that have streams of their own;
    titles say which ``executor`` runs the plan, if that has no streams."""
    name = f"plan {plan.name!r}"
    if executor != "streams" and schedules.of(plan.steps).schedule.n_streams > 1:
        name += f", run by executor {executor} now"
    return Schedule(_charts(plan.steps, name, schedules))


def _charts(steps: Sequence[Step], name: str, schedules: StreamSchedules) -> Iterator[Chart]:
    block = schedules.of(steps)
    schedule = block.schedule
    cost = [schedules.seconds(steps[i]) for i in block.nodes]
    rank = ranks(block.dag, cost)
    number = {k: n for n, k in enumerate(schedule.order, 1)}

    def bar(k: int) -> Bar:
        node = steps[block.nodes[k]].node
        return Bar(
            number[k],
            operation_name(node),
            node.origin or node.name,
            block.start[k],
            block.finish[k],
            rank[k],
            schedule.waits[k],
            schedule.emits[k],
        )

    streams = tuple([tuple(map(bar, program)) for program in schedule.programs])
    names = schedules.names
    devices = tuple([names[d] for d in schedule.device_of])
    yield Chart(
        name,
        streams,
        devices,
        schedule.n_signals,
        schedule.begin,
        schedule.end,
        block.makespan,
        sum(map(schedules.seconds, steps)),
    )
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
