"""Mutate the plans of sessions: ``python -m tools.mutate_plans [--cases 1000] [--seed N]``.

Small models of many kinds are compiled by each executor. A case is a change

- of a saved session of theirs, with checksums that fit, which is opened and run; or
- of a schedule in memory (``schedule_mutations``), which the checker of plans refuses, or which is
  run.

Cases run in children that are forked from this process, which has imported and compiled before, so
that one takes milliseconds. What must never happen is reported:

- crash: the child has died, of a signal or as a sanitizer wants it;
- hang: a case took more than 20 s;
- memory: the child took more than twice ``max_bytes`` and 1 GiB;
- wrong: what differs in order and places alone, or was let pass as a schedule, gave other answers;
- foreign: an exception that is no ``PenstockError``, or an ``InternalError``.

A case follows from the seed and its number, so that ``--seed N --case NUMBER`` repeats it. The
exit code is 1 if anything was found. CONTRIBUTING.md says how to compile the kernels for
sanitizers, which see reads and writes beyond arrays that would mostly go unnoticed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.expert import with_expert
from tests.support.plan_models import feeds_of, plan_models, suite_models

import penstock as ps
from penstock.compiler import compiler, stages
from penstock.compiler.stages import CompileContext, Scheduled
from penstock.core.errors import InternalError
from penstock.executors.control import Control
from penstock.host.native import library
from penstock.host.threads import usable_cores
from penstock.plan.check import check_schedule
from penstock.plan.check_places import UnsoundPlanError
from tools.fuzz_answers import UNDEFINED, alike
from tools.mutations import changed_artifact, changed_bytes, changed_plan
from tools.schedule_mutations import changed_schedule

MAX_BYTES = 2**28
LIMITS = ps.Limits(
    max_bytes=MAX_BYTES, max_constant_bytes=MAX_BYTES, max_iterations=1000, max_nodes=10_000
)
TIMEOUT_S = 2.0
HANG_S = 20.0
MEMORY = 2 * MAX_BYTES + 2**30
BATCH = 200
"""Cases of a child, after which another one is forked"""

OPTIONS: Sequence[Mapping[str, Any]] = (
    {"executor": "linear", "threads": 1},
    {"executor": "linear", "threads": 1, "backends": ["native", "numpy"]},
    {"executor": "linear", "threads": 2},
    {"executor": "dataflow", "threads": 1},
    {"executor": "streams", "threads": 2, "max_streams": 2},
)
KINDS = ("saved", "schedule")


@dataclass(frozen=True)
class Subject:
    """A model that was compiled, saved, and run with ``feeds``; ``answers`` has what it gave in two
    runs, None if these differ, as those of a model with variables do."""

    name: str
    content: bytes
    feeds: Mapping[str, Any]
    answers: dict[str, Any] | None
    schedule: Scheduled | None
    context: CompileContext | None


def subjects(with_suite: bool = False, step: int = 1) -> list[Subject]:
    """All models by all executors; if wanted, those of the ONNX suite that run with any feeds, in
    one order alone. Of all but these, each ``step``-th is made."""
    pairs = [(name, model, options) for name, model in plan_models() for options in OPTIONS]
    made = [subject(*pair) for pair in pairs[::step]]
    for name, model in suite_models() if with_suite else ():
        with suppress(ps.PenstockError):
            made.append(subject(name, model, OPTIONS[1]))
    return made


def subject(name: str, model: Any, options: Mapping[str, Any]) -> Subject:
    label = f"{name} by {', '.join(map(str, options.values()))}"
    with tempfile.TemporaryDirectory() as folder, _recorded() as recorded:
        path = Path(folder, "model.penstock")
        with ps.compile(model, limits=LIMITS, cache=False, **with_expert(options)) as session:
            feeds = feeds_of(session.inputs)
            answers, again = session.run(feeds), session.run(feeds)
            session.save(path)
        schedule, context = recorded[-1] if recorded else (None, None)
        content = path.read_bytes()
        stable = alike(answers, again) and not UNDEFINED.search(content)
        return Subject(label, content, feeds, answers if stable else None, schedule, context)


@contextmanager
def _recorded() -> Iterator[list[tuple[Scheduled, CompileContext]]]:
    """The schedules that programs are written of meanwhile, each with its context."""
    recorded: list[tuple[Scheduled, CompileContext]] = []

    def record(schedule: Scheduled, context: CompileContext) -> Scheduled:
        recorded.append((schedule, context))
        return schedule

    lines = dict(compiler.LINES)
    for name, line in lines.items():
        if stages.generate_program in line:
            at = line.index(stages.generate_program)
            compiler.LINES[name] = (*line[:at], record, *line[at:])  # type: ignore[index]
    try:
        yield recorded
    finally:
        compiler.LINES.update(lines)  # type: ignore[attr-defined]


# Cases.


def outcome_of(case: Callable[[], str]) -> str:
    """What became of a case: "refused", or what it returns; else what is wrong with it."""
    try:
        return case()
    except InternalError as error:
        return _foreign(error)
    except ps.PenstockError as error:
        return f"refused by {type(error).__name__}"
    except Exception as error:
        return _foreign(error)


def _foreign(error: Exception) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "penstock" in f.filename]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    return f"foreign: {type(error).__name__} in {where}: {error}"[:400]


def saved_case(subject: Subject, draw: random.Random, path: Path) -> str:
    """Open and run a saved session that was changed."""
    same, chance = False, draw.random()
    if chance < 0.8:
        content, same = changed_plan(subject.content, draw)
    else:
        change = changed_artifact if chance < 0.95 else changed_bytes
        content = change(subject.content, draw)
    path.unlink(missing_ok=True)  # a session that holds the file may still be there
    path.write_bytes(content)
    with ps.open(path, limits=LIMITS, map_weights=draw.random() < 0.5) as session:
        feeds = {
            port.name: x for port, x in zip(session.inputs, subject.feeds.values(), strict=False)
        }
        for _ in range(2):
            answers = session.run(feeds, timeout=TIMEOUT_S)
    return _judged(answers, subject, same=same)


def schedule_case(subject: Subject, draw: random.Random, path: Path) -> str:
    """Check a schedule that was changed, and run it if it passes."""
    if subject.schedule is None or subject.context is None:
        return "without a schedule"
    schedule, same = changed_schedule(subject.schedule, draw)
    try:
        check_schedule(schedule.plan, schedule.arena_plan, schedule.tasks)
    except UnsoundPlanError:
        return "refused by the checker"
    program = stages.generate_program(schedule, subject.context)
    executor = stages.bind(program, subject.context)
    values = [np.asarray(x) if not isinstance(x, list) else x for x in subject.feeds.values()]
    for _ in range(2):
        outputs = executor.run(values, Control(TIMEOUT_S))
    return _judged(dict(zip(subject.answers or (), outputs, strict=False)), subject, same=same)


def _judged(answers: dict[str, Any], subject: Subject, *, same: bool) -> str:
    if not same or subject.answers is None:
        return "harmless"
    return "the same answers" if alike(answers, subject.answers) else "wrong: other answers"


CASES: Mapping[str, Callable[[Subject, random.Random, Path], str]] = {
    "saved": saved_case,
    "schedule": schedule_case,
}


def is_finding(outcome: str) -> bool:
    return outcome.startswith(("crash", "hang", "memory", "wrong", "foreign"))


# Children.


@dataclass
class Child:
    """A forked process that tries the cases of ``numbers``, and tells which one it tries."""

    process: int
    pipe: int
    log: Any
    numbers: list[int]
    started: float = 0.0
    tail: bytes = b""
    outcomes: dict[int, str] = field(default_factory=dict)

    def read(self) -> bool:
        """Take in what the child tells; False at its end."""
        data = os.read(self.pipe, 1 << 16)
        self.started = time.monotonic()
        *lines, self.tail = (self.tail + data).split(b"\n")
        self.outcomes.update(json.loads(line) for line in lines)
        return bool(data)


def forked(numbers: list[int], one: Callable[[int], str]) -> Child:
    """A child that tries ``numbers`` in turn."""
    reader, writer = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child is looked at
    process = os.fork()
    if process:
        os.close(writer)
        return Child(process, reader, log, numbers, time.monotonic())
    try:
        os.close(reader)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log.fileno())
        for number in numbers:
            faulthandler.dump_traceback_later(HANG_S - 2, file=log.fileno())
            os.write(writer, json.dumps([number, one(number)]).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(9)
    os._exit(0)


def ended(child: Child, *, hung: bool) -> list[int]:
    """Take leave of a child; returns the cases behind the one that it died of, which has failed."""
    if hung:
        os.kill(child.process, signal.SIGKILL)
    status = os.waitpid(child.process, 0)[1]
    os.close(child.pipe)
    left = [number for number in child.numbers if number not in child.outcomes]
    child.log.seek(0)
    text = child.log.read().decode(errors="replace")
    child.log.close()
    if left:
        at = max(text.find("ERROR: AddressSanitizer"), text.find("runtime error"), 0)
        what = "hang" if hung else f"crash ({os.waitstatus_to_exitcode(status)})"
        child.outcomes[left[0]] = f"{what}: {text[at : at + 3000]}"
    return left[1:]


def mutate(
    seed: str, numbers: Sequence[int], kinds: Sequence[str], jobs: int, everything: list[Subject]
) -> Counter[str]:
    """Try cases; the outcomes. Prints findings, one of each sort."""
    gc.collect()
    gc.freeze()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:

        def one(number: int) -> str:
            draw = random.Random(f"{seed} {number}")
            subject, kind = draw.choice(everything), draw.choice(kinds)
            path = Path(folder, f"{os.getpid()}.penstock")
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            outcome = outcome_of(lambda: CASES[kind](subject, draw, path))
            status = Path("/proc/self/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
            outcome = outcome if peak < MEMORY else f"memory: {peak >> 20} MiB"
            return (
                f"{outcome}\n  {kind}, {subject.name}"
                if is_finding(outcome)
                else f"{kind}: {outcome}"
            )

        batches = [list(numbers[i : i + BATCH]) for i in range(0, len(numbers), BATCH)]
        children: list[Child] = []
        while batches or children:
            while batches and len(children) < jobs:
                children.append(forked(batches.pop(), one))
            ready = select.select([child.pipe for child in children], [], [], 1.0)[0]
            for child in list(children):
                hung = time.monotonic() - child.started > HANG_S
                if (child.pipe in ready and not child.read()) or hung:
                    children.remove(child)
                    if left := ended(child, hung=hung):
                        batches.append(left)
                    for number, outcome in child.outcomes.items():
                        report(counts, number, outcome)
    return counts


def report(counts: Counter[str], number: int, outcome: str) -> None:
    if not is_finding(outcome):
        counts[outcome] += 1
        return
    sort = "".join(c for c in outcome.splitlines()[0] if not c.isdigit())[:150]
    counts[sort] += 1
    if counts[sort] == 1:
        print(f"case {number}: {outcome}", flush=True)


def sanitized() -> bool:
    """Whether the compiled kernels are for sanitizers."""
    native = library()
    return native is not None and b"__asan_init" in Path(native.path).read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", default=None, help="by default a new one, which is printed")
    parser.add_argument("--case", type=int, help="the number of one case to try again")
    parser.add_argument("--kind", choices=KINDS, help="try cases of this kind alone")
    parser.add_argument("--step", type=int, default=1, help="use each so-manieth model alone")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes at once")
    parser.add_argument(
        "--suite", action="store_true", help="models of the official ONNX suite too"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    seed = args.seed or secrets.token_hex(4)
    numbers = range(args.cases) if args.case is None else [args.case]
    begin = time.monotonic()
    kinds = [args.kind] if args.kind else KINDS
    counts = mutate(seed, numbers, kinds, args.jobs, subjects(args.suite, args.step))
    for outcome, count in counts.most_common():
        print(f"{count:8} {outcome}")
    found = {sort: n for sort, n in counts.items() if is_finding(sort)}
    how = "with sanitizers" if sanitized() else "without sanitizers"
    print(
        f"seed {seed}: {counts.total()} cases {how} in {time.monotonic() - begin:.0f} s, "
        f"{len(found)} findings, {sum(found.values())} in all"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
