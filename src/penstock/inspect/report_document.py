"""Reports as plain data: a plan, a run of it on a time line, its memory, and times of steps.

Steps and values are numbered from 0, and everything refers to a step by its number, so that the
page can link all of its views. Long tables are stored as a list for each column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from penstock.core.records import dataclass
from penstock.core.types import JsonObject, TensorType
from penstock.inspect.plan_document import nested_steps
from penstock.ir.graph import Node
from penstock.observers.profile import Profile
from penstock.observers.timeline import Replay, Span, assign_lanes
from penstock.observers.trace import Trace
from penstock.observers.values import ValueComparison, ValueKeeper
from penstock.ops.internal.fused import operation_name, parts
from penstock.plan.arena_layout import ArenaPlan, Intervals
from penstock.plan.plan import Plan, Slot, Step, StepTable, step_edges
from penstock.plan.step_facts import step_facts
from penstock.plan.tasks import Signals

# Executions of steps on the time line: loops may have millions.
MOST_SPANS = 50_000


@dataclass(frozen=True, eq=False)
class Observation:
    """Observations of a plan: ``profile`` of some runs, ``trace`` of one; ``reasons`` say why some
    steps run on their backends. ``scopes`` are those of ``Model.scopes``, ``signals`` those of the
    plan's tasks."""

    table: StepTable
    arena_plan: ArenaPlan | None
    profile: Profile
    trace: Trace
    reasons: Mapping[Step, str]
    scopes: Mapping[str, str]
    signals: Signals


class _Numbers:
    """The steps of a plan in the order in which it lists them, those of blocks behind the step that
    carries them, with their numbers."""

    def __init__(self, plan: StepTable, arena_plan: ArenaPlan | None) -> None:
        order = range(len(plan.steps)) if arena_plan is None else arena_plan.order
        self.rows = list(nested_steps([plan.steps[i] for i in order]))
        self.of = {step: i for i, (step, _, _) in enumerate(self.rows)}


class _Scopes:
    """The scopes of a plan's steps: ``table`` has the row of the scope around each and its name,
    ``of`` the row of each step that is in one."""

    def __init__(self, plan: StepTable, known: Mapping[str, str]) -> None:
        self.table: list[tuple[int, str]] = []
        self.of: dict[Step, int] = {}
        rows: dict[Path, int] = {(): -1}
        for steps in step_lists(plan):
            for step, path in zip(steps, scopes_of(steps, plan.slots, known), strict=True):
                for length in range(1, len(path) + 1):
                    if path[:length] not in rows:
                        rows[path[:length]] = len(self.table)
                        self.table.append((rows[path[: length - 1]], path[length - 1]))
                if path:
                    self.of[step] = rows[path]


def step_lists(plan: StepTable) -> list[Sequence[Step]]:
    """The steps of a plan, and of each block in it."""
    return [plan.steps, *[block.steps for step in plan.walk() for block in step.blocks]]


def report_document(about: JsonObject, seen: Observation) -> JsonObject:
    """The data of a report, without a comparison; ``about`` has what is said of all of it."""
    plan, numbers = seen.table, _Numbers(seen.table, seen.arena_plan)
    scopes = _Scopes(plan, seen.scopes)
    arena = None
    if seen.arena_plan is not None and isinstance(plan, Plan):
        arena = arena_document(plan, seen.arena_plan, numbers.of)
    return {
        **about,
        "plan": plan.name,
        "inputs": list(plan.inputs),
        "outputs": list(plan.outputs),
        "constant_bytes": plan.constant_bytes,
        "runs": seen.profile.runs,
        "observed_s": seen.profile.observed / (seen.profile.runs or 1),
        "alone_s": seen.profile.wall / (seen.profile.runs or 1),
        "scopes": scopes.table,
        "steps": _steps(seen, numbers, scopes),
        "slots": _slots(plan.slots),
        "edges": _edges(plan, numbers),
        "timeline": _timeline(seen.trace, seen.signals, numbers),
        "arena": arena,
    }


def _steps(seen: Observation, numbers: _Numbers, scopes: _Scopes) -> dict[str, list[Any]]:
    seconds: dict[Step, tuple[int, float]] = {}
    for entry in seen.profile:
        seconds[entry.step] = entry.count, entry.total
    runs = seen.profile.runs or 1
    rows = []
    for step, parent, block in numbers.rows:
        row = asdict(step_facts(step))
        row["nodes"] = list(row["nodes"]) if len(row["nodes"]) > 1 else []
        count, total = seconds.get(step, (0, 0.0))
        written = [i for i in step.outputs if i >= 0]
        row |= {
            # In text, steps are numbered from 1.
            "parent": -1 if parent is None else parent - 1,
            "block": block or "",
            "scope": scopes.of.get(step, -1),
            "inputs": [i for i in step.inputs if i >= 0],
            "outputs": written,
            "written": sum(_nbytes(seen.table.slots[i]) for i in written),
            "workspace": 0 if step.workspace < 0 else seen.table.slots[step.workspace].nbytes,
            "control": step.control,
            "count": count / runs,
            "seconds": total / runs,
            "reason": seen.reasons.get(step, ""),
        }
        rows.append(row)
    return _columns(rows)


def _slots(slots: Sequence[Slot]) -> dict[str, list[Any]]:
    rows = [
        {
            "name": slot.name,
            "type": str(slot.type),
            "memory": slot.kind.value,
            "bytes": _nbytes(slot),
            "base": slot.base,
        }
        for slot in slots
    ]
    return _columns(rows)


def _nbytes(slot: Slot) -> int:
    """Bytes of a value, 0 if they are known only in a run."""
    known = isinstance(slot.type, TensorType) and slot.type.static
    return slot.nbytes if known else 0


def _columns(rows: Sequence[JsonObject]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _edges(plan: StepTable, numbers: _Numbers) -> list[tuple[int, int]]:
    """The dependencies between steps of the same block."""
    edges = []
    for steps in step_lists(plan):
        of = [numbers.of[step] for step in steps]
        edges += [(of[a], of[b]) for a, b in sorted(set(step_edges(plan.slots, steps)))]
    return edges


def _timeline(trace: Trace, signals: Signals, numbers: _Numbers) -> JsonObject:
    """Times are in microseconds since the run began. ``spans``: step, track, begin, duration and
    bytes copied to another backend; ``waits``: step, begin and duration from ready to begin;
    ``live``: times with the bytes that the run holds from then on. Steps on streams of devices are
    on a track of each stream while the host puts them there; these are the last ``of_devices``
    tracks."""
    replay = trace.replay()
    lanes = assign_lanes(replay.spans)
    places = [(thread, lane) for thread, count in lanes.items() for lane in range(count)]
    track = {place: i for i, place in enumerate(places)}
    spans = [span for span in replay.spans if span.step is not None]
    run = next((span for span in replay.spans if span.step is None), None)

    def track_of(span: Span) -> int:
        on = signals.on.get(span.step) if span.step is not None else None
        return len(places) + on[0] if on else track[span.thread, span.lane]

    return {
        "tracks": [
            (trace.thread_name(thread) or f"thread {thread}") + (f" ({lane + 1})" if lane else "")
            for thread, lane in places
        ]
        + [f"{device} stream {i}" for i, device in enumerate(signals.devices, 1)],
        "of_devices": len(signals.devices),
        "duration": 0 if run is None else (run.end - run.begin) / 1e3,
        "spans": [
            [*_times(span, replay, numbers, track_of(span)), span.transferred]
            for span in spans[:MOST_SPANS]
        ],
        "executions": len(spans),
        "waits": [_times(wait, replay, numbers) for wait in replay.waits[:MOST_SPANS]],
        "live": [((now - replay.origin) / 1e3, value) for now, value in replay.memory],
    }


def _times(span: Span, replay: Replay, numbers: _Numbers, *more: int) -> list[Any]:
    assert span.step is not None
    begin, duration = (span.begin - replay.origin) / 1e3, (span.end - span.begin) / 1e3
    return [numbers.of[span.step], *more, begin, duration]


# Comparisons.


def comparison_document(
    labels: tuple[str, str],
    seen: Observation,
    other: Observation,
    kept: ValueKeeper,
    compared: ValueComparison,
) -> JsonObject:
    """The differences of the values and times of two runs, ``seen`` and ``other``. ``values`` has a
    row for each value that both compute, the largest relative difference first; ``step`` is the
    number of the step of ``seen`` that computes it. ``only``: how many values one of them computes
    alone, as values inside of fused steps are."""
    numbers = _Numbers(seen.table, seen.arena_plan)
    maker, of_other = _makers(seen.table), _makers(other.table)
    profiles = [o.profile for o in (seen, other)]
    times = [{e.step: e.total / (p.runs or 1) for e in p} for p in profiles]
    rows = []
    for name, difference in compared.differences.items():
        first, second = maker[name], compared.steps[name]
        row: dict[str, Any] = {
            "name": name,
            "step": numbers.of[first],
            "operation": operation_name(first.node),
            "other_operation": operation_name(second.node),
            "backend": first.backend,
            "other_backend": second.backend,
            "seconds": times[0].get(first, 0.0),
            "other_seconds": times[1].get(second, 0.0),
            "same_shape": difference is not None,
        }
        if difference is not None:
            # JSON has no NaN and no infinities, whose difference from themselves is not 0.
            facts = asdict(difference).items()
            row |= {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in facts}
            row["relative"] = difference.relative
        rows.append(row)
    # Other shapes differ the most: False comes first.
    rows.sort(key=lambda row: (row["same_shape"], -row.get("relative", 0.0)))
    return {
        "labels": labels,
        "values": rows,
        "dropped": len(kept.dropped),
        "only": [len(maker.keys() - of_other), len(of_other.keys() - maker.keys())],
        "alone_s": [o.profile.wall / (o.profile.runs or 1) for o in (seen, other)],
    }


def _makers(table: StepTable) -> dict[str, Step]:
    """The step that computes each value, by the name of the value."""
    outputs = [(slot, step) for step in table.walk() for slot in step.outputs if slot >= 0]
    return {table.slots[slot].name: step for slot, step in outputs}


# Scopes of steps: the parts of a model that its exporter has written into names.
#
# TensorFlow, TorchScript's exporter and tf2onnx name nodes by the modules around them, with
# slashes: "/encoder/layer.0/attention/MatMul". TFLite has such names for values alone, and torch's
# present exporter says the modules of a node beside its name, which is ``Model.scopes``.


Path = tuple[str, ...]


def scope_of(step: Step, known: Mapping[str, str]) -> Path:
    """The innermost scope that holds all nodes of a step. ``known``: scopes by names of nodes, with
    slashes between their parts; what is not in it has none, unless it is empty."""
    return common([_of_node(node, known) for node in parts(step.node)])


def scopes_of(steps: Sequence[Step], slots: Sequence[Slot], known: Mapping[str, str]) -> list[Path]:
    """The scope of each step of one block. A step without one, which a pass has added, gets what is
    common to those of the steps beside it."""
    scopes = [scope_of(step, known) for step in steps]
    if not any(scopes):
        return scopes
    near: dict[int, set[Path]] = {}
    for a, b in step_edges(slots, steps):
        for one, other in ((a, b), (b, a)):
            if not scopes[one] and scopes[other]:
                near.setdefault(one, set()).add(scopes[other])
    for i, paths in near.items():
        scopes[i] = common(paths)
    return scopes


def scope_in(name: str) -> Path:
    """The scope in a name. TFLite joins the names of what it has fused by semicolons.

    >>> scope_in("/encoder/layer.0/MatMul")
    ('encoder', 'layer.0')
    >>> scope_in("net/stage/Relu;net/stage/conv/Conv2D")
    ('net', 'stage')
    """
    return common([tuple(filter(None, one.split("/")[:-1])) for one in name.split(";") if one])


def common(paths: Iterable[Path]) -> Path:
    """The longest path that all of ``paths`` begin with."""
    columns = zip(*paths, strict=False)
    return tuple([column[0] for column in takewhile(lambda c: len({*c}) == 1, columns)])


def _of_node(node: Node, known: Mapping[str, str]) -> Path:
    if node.op.domain == "penstock":
        return ()  # added for the steps beside it, and named after a value
    if known:
        # Nodes that a pass makes are named after the original, which comes before a slash.
        scope = known.get(node.name) or known.get(node.name.partition("/")[0], "")
        return tuple(filter(None, scope.split("/")))
    written = next((value.name for value in node.outputs if value is not None), "")
    return scope_in(node.name) or scope_in(written)


# The buffers of the arena as plain data: their places and lifetimes, and the peak.
#
# Time is the plan's own clock, which ticks once for each step: the order is known before a run, and
# where tasks overlap, so may their buffers.


def arena_document(plan: Plan, arena_plan: ArenaPlan, number: Mapping[Step, int]) -> JsonObject:
    """``buffers``: slot that owns it, offset, bytes, first and last tick (included), and the slots
    that share it; ``clock``: the step of each tick, -1 between blocks; ``live``: bytes at each
    tick; ``peak``: its tick, its bytes, and the buffers that are live then, the largest first."""
    lifetimes = Intervals(plan, arena_plan.order)
    members: dict[int, list[int]] = defaultdict(list)
    for slot, owner in arena_plan.buffer_of.items():
        members[owner].append(slot)
    buffers: list[Any] = []
    for owner, slots in members.items():
        first = min(lifetimes.first[slot] for slot in slots)
        last = max(lifetimes.last[slot] for slot in slots)
        place = arena_plan.offsets[owner], plan.slots[owner].nbytes
        buffers.append([owner, *place, first, last, sorted(slots, key=lifetimes.first.__getitem__)])
    ticks = 1 + max([tick for tick, _ in lifetimes.steps] + [b[4] for b in buffers], default=-1)
    clock = [-1] * ticks
    for tick, step in lifetimes.steps:
        clock[tick] = number[step]
    change = [0] * (ticks + 1)
    for _, _, nbytes, first, last, _ in buffers:
        change[first] += nbytes
        # The last tick is included.
        change[last + 1] -= nbytes
    live, now = [], 0
    for tick in range(ticks):
        now += change[tick]
        live.append(now)
    peak: dict[str, Any] = {"tick": -1, "bytes": 0, "buffers": []}
    if live:
        at = max(range(ticks), key=live.__getitem__)
        there = [i for i, b in enumerate(buffers) if b[3] <= at <= b[4] and b[2]]
        there.sort(key=lambda i: -buffers[i][2])
        peak = {"tick": at, "bytes": live[at], "buffers": there}
    return {
        "size": arena_plan.size,
        "lower_bound": arena_plan.lower_bound,
        "planner": arena_plan.planner,
        "buffers": buffers,
        "clock": clock,
        "live": live,
        "peak": peak,
    }
