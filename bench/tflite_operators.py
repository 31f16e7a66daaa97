"""Time TFLite's builtin operators beside LiteRT: ``python -m bench.tflite --operators``.

Each operator that LiteRT has a kernel of for processors is a model, for each of the types that the
operator has, in two sizes (``bench.tflite_operator_cases``). Penstock and LiteRT run it, fed and
fetched, each in a process of its own, in turn. The least time of all turns counts; with one thread
it is that of the processor, which other processes have no part in. Prints a table of all rows, with
the backends and operations that are the steps of Penstock's plan, a geometric mean for each type,
and the rows in which Penstock is slow; ``--write`` writes them to ``bench/tflite-operators.md``::

    python -m bench.tflite --operators --only CONV_2D SOFTMAX --turns 1

Outputs are compared, and a note says where real numbers differ by more than a thousandth of the
largest, codes by more than one step and others at all, or why an engine refuses a model. LiteRT has
its default kernels and delegate, which round otherwise than those of its reference.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from typing import Any

import numpy as np
from tests.support.tflite_operators import LITERT_LACKS, REASONS, names

from bench import operator_rows
from bench.exports import CACHE
from bench.operator_rows import OperatorRow, add_options, means, measure, slow_rows
from bench.tables import OURS, disagreement, heading, line
from bench.tflite_operator_cases import CASES, OperatorCase
from bench.versus import HERE, described
from bench.zoo import worker
from bench.zoo.store import save_arrays

PAGE = "tflite-operators.md"
REFERENCE = "litert"
TURNS = 2
MOST, SHORT = 1.05, 2e-6  # ratios above are listed, of runs that are not as short
TOLERANCE = 1e-3
MODULES = ("tflite_operator_cases", "tflite_operator_cases_arrays", "tflite_operator_cases_layers")
WITH_OTHERS = {
    "CALL_ONCE": "run once: in the models of ASSIGN_VARIABLE and HASHTABLE_FIND",
    "HASHTABLE": "in the model of HASHTABLE_FIND",
    "HASHTABLE_IMPORT": "run once: in the model of HASHTABLE_FIND",
    "READ_VARIABLE": "in the model of ASSIGN_VARIABLE",
    "VAR_HANDLE": "in the model of ASSIGN_VARIABLE",
}
"""Operators that are of no use but beside another one."""


def cases(only: Sequence[str] = ("",)) -> list[OperatorCase]:
    """Those whose titles have one of ``only`` in them, by title and type, small ones first."""
    for module in MODULES:
        import_module(f"bench.{module}")
    chosen = [case for case in CASES if any(part in case.title for part in only)]
    return sorted(chosen, key=lambda case: case.title)


def without_cases(only: Sequence[str] = ("",)) -> Iterator[tuple[str, str]]:
    """The other builtin operators of the schemas, and why they have no cases."""
    for name in (*names(circle=False), *names(circle=True)):
        if any(part in name for part in only):
            if name in WITH_OTHERS:
                yield name, WITH_OTHERS[name]
            elif name in REASONS:
                yield name, f"not there: {REASONS[name]}"
            elif name in LITERT_LACKS or name in names(circle=True):
                yield name, "LiteRT has no kernel"


# Rows.


@dataclass
class Row(OperatorRow):
    """``steps`` are the backends and operations of those of Penstock's plan that are no views."""

    reference, most, short = REFERENCE, MOST, SHORT
    case: OperatorCase
    steps: Sequence[Sequence[str]] = field(default_factory=list)

    @property
    def runs(self) -> str:
        """What runs the case: "native: Conv, 2 Relu; numpy: Foo"."""
        listed = []
        for backend, steps in groupby(self.steps, key=lambda step: step[0]):
            counts = [(op, len([*same])) for op, same in groupby(op for _, op in steps)]
            names = [op if count == 1 else f"{count} {op}" for op, count in counts]
            listed.append(f"{backend or 'control flow'}: {', '.join(names)}")
        return "; ".join(listed) or ("views" if OURS in self.seconds else "-")

    @property
    def line(self) -> str:
        count = len(self.steps) if OURS in self.seconds else "-"
        return line(self.case.title, self.case.type, *self.figures, self.runs, count, self.remarks)


def differences(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> str | None:
    """How outputs differ by more than rounding, for people; None where they do not."""
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"differs: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        if b.dtype.kind in "fc":
            parts = [(a.real, b.real), (a.imag, b.imag)] if b.dtype.kind == "c" else [(a, b)]
            apart = max(disagreement([x], [y])[0] for x, y in parts)
            if apart > TOLERANCE:
                return f"differs by {apart:.1e}"
        elif b.dtype.kind in "iu" and b.dtype.itemsize < 4:
            steps = np.abs(a.astype(int) - b.astype(int))
            if steps.max(initial=0) > 1:
                count = f"{np.sum(steps > 1)} of {b.size}"
                return f"differs by up to {steps.max()} steps, {count} by more than one"
        elif not np.array_equal(a, b):
            return f"differs in {np.sum(a != b)} of {b.size} elements"
    return None


class Sweep(operator_rows.Sweep):
    def add(self, row: Row) -> None:
        model = row.case.model()
        path, feeds = self.folder / "case.tflite", self.folder / "case.npz"
        path.write_bytes(model.file)
        save_arrays(feeds, feed=model.feeds.values())
        job = worker.Job(str(path), list(model.feeds), {"case": str(feeds)})
        answers = {}
        for engine in self.workers:
            outcome = self.turn(engine, row, job if engine == REFERENCE else _planned(job))
            if outcome is not None:
                row.add_turn(engine, outcome.runs["case"])
                row.steps = outcome.steps or row.steps
                answers[engine] = self.outputs(engine)
        if len(answers) == len(self.workers) and model.alike:
            difference = differences(answers[OURS], answers[REFERENCE])
            if difference is not None:
                row.note(difference)


def _planned(job: worker.Job) -> worker.Job:
    return worker.Job(job.path, job.inputs, job.cases, planned=True)


COLUMNS = ["operator", "type", "size", "LiteRT", "Penstock", "ratio", "run by", "steps", "note"]


def table_title(threads: int) -> str:
    return (
        f"The least time of a run, us; threads: {threads}. Behind a size are the case's dims. "
        "Views are no steps."
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """The counts, the means of the types, and the slow rows."""
    operators = {row.case.operator for row in rows}
    ours = [row for row in rows if OURS in row.seconds]
    native = sum({backend for backend, _ in row.steps} <= {"native"} for row in ours)
    counts = (
        f"{len(rows)} rows of {len(operators)} operators; both engines run "
        f"{sum(row.ratio is not None for row in rows)}; of {native} all steps are native kernels "
        "or views."
    )
    return [
        "",
        counts,
        *means(rows, "type", MOST, lambda case: case.type),
        *means(rows, "size", MOST, lambda case: case.size),
        *slow_rows(rows, "LiteRT", COLUMNS, MOST, SHORT),
    ]


def lines_without_cases(only: Sequence[str]) -> list[str]:
    others = list(without_cases(only))
    if not others:
        return []
    return heading("Without rows.", ["operator", "why"]) + [line(*other) for other in others]


def page(rows: Sequence[Row], options: Namespace, busy: float) -> list[str]:
    return [
        "# Operators of TFLite",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.tflite --operators`: "
        f"{described()}, ai_edge_litert {version('ai_edge_litert')}.",
        f"Engines in turn, each in its own process. Turns: {options.turns}. "
        f"Load average at the end: {busy:.1f}.",
        "",
        "Where answers differ: LiteRT rounds activations of hybrid layers to 8 bits, as Penstock "
        "does in dense layers alone; its default kernels and delegate round otherwise than its "
        "reference kernels; and some of its kernels read codes as numbers, whatever their zero "
        "point.",
        *summary(rows),
        *heading(table_title(options.threads), COLUMNS),
        *(row.line for row in rows),
        *lines_without_cases(options.only),
    ]


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m bench.tflite --operators", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add_options(parser, TURNS, PAGE)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    chosen = cases(options.only)
    if not chosen and not any(without_cases(options.only)):
        sys.exit("no such operator; there are: " + ", ".join({c.operator: 0 for c in cases()}))
    print("\n".join(heading(table_title(options.threads), COLUMNS)), flush=True)
    sweep_in: Any = partial(Sweep, partial(worker.Worker, cache=CACHE), REFERENCE, options.threads)
    rows = measure([Row(case) for case in chosen], sweep_in, options.turns)
    print("\n".join([*summary(rows), *lines_without_cases(options.only)]))
    if options.write:
        (HERE / PAGE).write_text("\n".join(page(rows, options, os.getloadavg()[0])) + "\n")
