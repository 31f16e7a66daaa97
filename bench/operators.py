"""Time operations of ONNX Runtime's domain and of ai.onnx.ml: ``python -m bench.operators``.

Each operation of com.microsoft that ONNX Runtime has a kernel of for processors, and each of
ai.onnx.ml, is a model of one node, in three sizes (``bench.operator_cases``). Penstock and ONNX
Runtime run it by ``session.run``, each in a process of its own, in turn. The least time of all
turns counts; with one thread it is that of the processor, which other processes have no part in.
Prints a table of all rows, a geometric mean for each domain, and the rows in which Penstock is
slow; ``--write`` writes them to ``bench/operators.md``::

    python -m bench.operators --only GroupQueryAttention MoE --turns 1

Outputs are compared, and a note says where they differ or why an engine refuses a model. In forms
that are "fed back" each run is given the caches that the one before returned. In the form "shared
buffer", and for SparseAttention, which it runs in no other way, ONNX Runtime is given caches by an
``IOBinding`` that has inputs and outputs in the same memory; Penstock's are fed back.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx

from bench import operator_rows
from bench.exports import CACHE
from bench.operator_cases import CASES, Node, OperatorCase, feeds_of
from bench.operator_rows import OperatorRow, add_options, means, measure, slow_rows
from bench.peers import ENGINES, Engine, OnnxRuntime, Penstock, Run
from bench.tables import LOADING_PEER, OURS, disagreement, heading
from bench.versus import HERE, described
from bench.zoo import worker

PAGE = "operators.md"
REFERENCE = LOADING_PEER  # ONNX Runtime
TURNS = 2
MOST, SHORT = 1.2, 20e-6  # ratios above are listed, of runs that are not as short
TOLERANCE = 1e-3
MODULES = ("operator_cases", "operator_cases_language", "operator_cases_ml")


def cases(only: Sequence[str] = ("",)) -> list[OperatorCase]:
    """Those whose titles have one of ``only`` in them, by domain and title, small ones first."""
    for module in MODULES:
        import_module(f"bench.{module}")
    chosen = [case for case in CASES if any(part in case.title for part in only)]
    return sorted(chosen, key=lambda case: (case.domain, case.title))


# Processes.


@dataclass(frozen=True)
class Fed:
    """What a model is fed, and how: see ``operator_cases.Node``. It lies beside the file of the
    model, since the files of ``bench.zoo`` hold arrays alone, and some inputs are maps."""

    feeds: dict[str, Any]
    fed_back: Mapping[str, int]
    steps: int
    counted: Sequence[str]
    bound: bool
    sparse: Sequence[str]

    @classmethod
    def of(cls, node: Node) -> Fed:
        return cls(
            feeds_of(node),
            {f"x{i}": output for i, output in node.fed_back.items()},
            node.steps,
            [f"x{i}" for i in node.counted],
            node.bound,
            [f"x{i}" for i in node.sparse],
        )

    @classmethod
    def beside(cls, path: Path) -> Fed:
        return cls(**pickle.loads(path.with_suffix(".pickle").read_bytes()))

    def write_beside(self, path: Path) -> None:
        path.with_suffix(".pickle").write_bytes(pickle.dumps(vars(self)))

    def job(self, run: Run) -> Run:
        """All steps, with the outputs of the last, on these feeds instead of those it is given."""
        if self.steps == 1:
            return lambda _: run(self.feeds)
        steps = [{name: self.feeds[name] + i for name in self.counted} for i in range(self.steps)]

        def decode(_: object) -> list[np.ndarray]:
            outputs = run(self.feeds)
            for counts in steps[1:]:
                caches = {name: outputs[i] for name, i in self.fed_back.items()}
                outputs = run({**self.feeds, **counts, **caches})
            return outputs

        return decode


class FedPenstock(Penstock):
    def load(self, path: Path) -> Run:
        return Fed.beside(path).job(super().load(path))


class FedOnnxRuntime(OnnxRuntime):
    def load(self, path: Path) -> Run:
        fed = Fed.beside(path)
        if fed.bound:
            return fed.job(self._bound(path, fed))
        fed.feeds.update((name, self._sparse(fed.feeds[name])) for name in fed.sparse)
        return fed.job(super().load(path))

    def _sparse(self, dense: np.ndarray) -> Any:
        places = np.ascontiguousarray(np.argwhere(dense))
        values = dense[dense != 0]
        shape, device = np.array(dense.shape), self.ort.OrtDevice.make("cpu", 0)
        sparse = self.ort.SparseTensor.sparse_coo_from_numpy(shape, values, places, device)
        return self.ort.OrtValue.ort_value_from_sparse_tensor(sparse)

    def _bound(self, path: Path, fed: Fed) -> Run:
        """Runs with the outputs of caches in the memory of their inputs. They return the first
        output, and None for caches: to copy them would take a step's time."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        session = self.ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        names = [output.name for output in session.get_outputs()]
        binding.bind_output(names[0])
        for name, output in fed.fed_back.items():
            cache = self.ort.OrtValue.ortvalue_from_numpy(fed.feeds[name])
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(names[output], cache)

        def run(feeds: dict[str, Any]) -> list[Any]:
            for name, array in feeds.items():
                if name not in fed.fed_back:
                    binding.bind_cpu_input(name, array)
            session.run_with_iobinding(binding)
            return [binding.get_outputs()[0].numpy(), *[None] * len(fed.fed_back)]

        return run


def serve() -> None:
    """Do the jobs of standard input, as ``bench.zoo.worker`` does."""
    engines = {OURS: FedPenstock, REFERENCE: FedOnnxRuntime}
    ENGINES.update(cast("dict[str, type[Engine]]", engines))
    worker.main()


class OperatorWorker(worker.Worker):
    """A process whose engine takes its feeds from beside the model."""

    def __init__(self, engine: str, threads: int) -> None:
        super().__init__(engine, threads, CACHE)
        program = "from bench.operators import serve; serve()"
        self.command = [sys.executable, "-c", program, engine, str(threads)]


# Rows.


@dataclass
class Row(OperatorRow):
    reference, most, short = REFERENCE, MOST, SHORT


def difference(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """How far outputs are apart: floats relative to the largest, 8-bit codes by more than one, as
    where a number lies between two; infinite where other values are not equal."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
            return math.inf
        if b.dtype.kind == "f":
            worst = max(worst, disagreement([a], [b])[0])
        elif b.dtype in (np.int8, np.uint8):
            apart = np.abs(a.astype(int) - b.astype(int)).max(initial=0)
            worst = max(worst, max(0, apart - 1) / 256)
        elif not np.array_equal(a, b):
            return math.inf
    return worst


class Sweep(operator_rows.Sweep):
    """Of models with their feeds beside them."""

    def add(self, row: Row) -> None:
        node = row.case.node()
        path = self.folder / "case.onnx"
        onnx.save(row.case.model(node), path)
        Fed.of(node).write_beside(path)
        np.savez(self.folder / "case.npz")
        job = worker.Job(str(path), [], {"case": str(self.folder / "case.npz")})
        answers: dict[str, list[np.ndarray]] = {}
        for engine in self.workers:
            outcome = self.turn(engine, row, job)
            if outcome is not None:
                row.add_turn(engine, outcome.runs["case"] / node.steps)
                answers[engine] = self.outputs(engine)
        if len(answers) == len(self.workers):
            count = 1 if node.bound else len(answers[REFERENCE])
            apart = difference(answers[OURS][:count], answers[REFERENCE])
            if apart > TOLERANCE:
                row.note(f"differs by {apart:.1e}")


COLUMNS = ["operation", "size", "ONNX Runtime", "Penstock", "ratio", "note"]


def table_title(threads: int) -> str:
    return f"The least time of a run, us; threads: {threads}. Behind a size are the case's dims."


def summary(rows: Sequence[Row]) -> list[str]:
    """The means of the domains, and the slow rows."""
    return means(rows, "domain", MOST, lambda case: case.domain) + slow_rows(
        rows, "ONNX Runtime", COLUMNS, MOST, SHORT
    )


def page(rows: Sequence[Row], threads: int, turns: int, busy: float) -> list[str]:
    return [
        "# Operations of ONNX Runtime and of ai.onnx.ml",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.operators`: {described()}.",
        f"Engines in turn, each in its own process. Turns: {turns}. "
        f"Load average at the end: {busy:.1f}.",
        *summary(rows),
        *heading(table_title(threads), COLUMNS),
        *(row.line for row in rows),
    ]


def parse() -> Namespace:
    parser = ArgumentParser(prog="python -m bench.operators", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add_options(parser, TURNS, PAGE)
    return parser.parse_args()


def main() -> None:
    options = parse()
    chosen = cases(options.only)
    if not chosen:
        sys.exit("no such operation; there are: " + ", ".join({c.operation: 0 for c in cases()}))
    print("\n".join(heading(table_title(options.threads), COLUMNS)), flush=True)
    sweep_in = partial(Sweep, OperatorWorker, REFERENCE, options.threads)
    rows = measure([Row(case) for case in chosen], sweep_in, options.turns)
    print("\n".join(summary(rows)))
    if options.write:
        lines = page(rows, options.threads, options.turns, os.getloadavg()[0])
        (HERE / PAGE).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
