"""Code generation for the steps of a block: kernel calls, signals, releases and observer calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from penstock.codegen.lifetimes import Lifetimes
from penstock.codegen.names import MOST_AHEAD, ProgramNames
from penstock.codegen.sequences import Gathering, is_joinable
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass
from penstock.core.types import TensorType
from penstock.host.native import library
from penstock.plan.plan import Plan, Step
from penstock.plan.tasks import NO_SIGNALS, ONE_FUNCTION, Tasks

# Estimated operations between stop checks: a few milliseconds of NumPy on one core.
_CHECK_EVERY = 50_000_000
# The estimate for a step of unknown shapes.
_UNKNOWN_WORK = 1_000_000
COMMENT_COLUMN = 60
"""column of comments"""

ControlFlowWriter: TypeAlias = "Callable[[StepWriter, Step], None]"


@dataclass(frozen=True)
class ProgramForm:
    """The form of a program of a plan.

    If ``observed``, it calls the control's observer for each step, with the step's inputs if
    ``inputs_observed``, else with none. The outputs ``given``, by number, are written into
    caller-provided arrays. ``capture``: whether device steps are captured into graphs where
    possible.
    """

    observed: bool = False
    inputs_observed: bool = True
    given: tuple[int, ...] = ()
    capture: bool = True


class SourceText:
    """Lines of Python. ``step_of_line[i]`` is the step that line i runs, if any, or those of a
    sequence or of a captured graph; ``depth`` is the indentation level of the next line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.step_of_line: list[Step | Sequence[Step] | None] = []
        self.depth = 0

    def write(self, text: str, step: Step | Sequence[Step] | None, comment: str = "") -> None:
        text = "    " * self.depth + text
        self.lines.append(f"{text:<{COMMENT_COLUMN}}  # {comment}" if comment else text)
        self.step_of_line.append(step)

    def append(self, other: SourceText) -> None:
        """Add the lines of another text."""
        self.lines += other.lines
        self.step_of_line += other.step_of_line


class GraphWriter(Protocol):
    """Writer of steps that a device captures into graphs (``codegen.captures``)."""

    def pieces(self, steps: Sequence[Step], counted: Collection[Step]) -> Iterable[list[Step]]:
        """Yield the steps of a block, grouped by graph."""

    def write(self, writer: StepWriter, steps: Sequence[Step]) -> None:
        """Write a call of a graph."""


class StepWriter:
    """Writes steps as ``text``. ``control_flow`` writes an If or a loop, and calls ``block`` for
    its blocks; ``graphs`` writes captured graphs. If the ``form`` is observed, each step is between
    calls of the run's observer.

    ``constants`` are values of names in the text, equal in every arena; ``given`` maps slots to the
    names of caller-provided arrays. ``loops`` is the loop depth of the current line; ``work`` the
    estimated operations since the last stop check; ``counts`` whether runs count their allocations;
    ``max_iterations`` the limit of a loop's iterations.
    """

    def __init__(
        self,
        plan: Plan,
        names: ProgramNames,
        lifetimes: Lifetimes,
        control_flow: ControlFlowWriter,
        tasks: Tasks | None,
        form: ProgramForm,
    ) -> None:
        self.plan = plan
        self.slots = plan.slots
        self.lifetimes = lifetimes
        self.form = form
        self.tasks = ONE_FUNCTION if tasks is None else tasks
        self.text = SourceText()
        self.constants: dict[str, Any] = {}
        self.given: Mapping[int, str] = {}
        self.counts = False
        self.max_iterations: int | None = None
        self.loops = 0
        self.work = 0
        self.name = names.slots
        self._names = names
        self._control_flow = control_flow
        self.graphs: GraphWriter | None = None
        self.gathering = Gathering(enabled=not form.observed and library() is not None)
        self._put: dict[int, int] = defaultdict(int)  # number of steps on each device stream

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        """Write a line, after the steps that have been gathered for a sequence."""
        if self.gathering.steps:
            self.write_gathered()
        self.text.write(text, step, comment)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.text.depth += 1
        yield
        self.text.depth -= 1

    def names(self, slots: Iterable[int]) -> str:
        return ", ".join([self.name[i] for i in slots])

    def block(self, steps: Sequence[Step]) -> None:
        """Write the steps of one block, or of one task; values are released after their last
        use."""
        if self.graphs is None:
            self._steps(steps)
        else:
            for piece in self.graphs.pieces(steps, self._names.counted):
                if len(piece) > 1:
                    self.graphs.write(self, piece)
                else:
                    self._steps(piece)
        self.write_gathered()

    def add_work(self, operations: int, step: Step) -> None:
        """Write a stop check before ``step``, if there were many operations since the last one."""
        self.work += operations
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.check_for_stop(step)

    def _steps(self, steps: Sequence[Step]) -> None:
        observed, signals = self.form.observed, self.tasks.signals
        for step in with_checkpoints(steps):
            if step.outputs and step.outputs[0] in self._names.turned:
                continue
            # In this order: observers measure the kernel alone, and values are released after their
            # last read.
            if signals is not NO_SIGNALS:
                self._wait(step)
            if observed:
                self._observe("began", step, step.inputs if self.form.inputs_observed else ())
            if step.kernel is None:
                self._control_flow(self, step)
            else:
                self._kernel(step)
            if observed:
                self._observe("ended", step, step.outputs)
            if step in self.lifetimes.after:
                self.release(self.lifetimes.after[step])
            if signals is NO_SIGNALS:
                continue
            for signal in signals.emits.get(step, ()):
                stream = signals.events.get(signal)
                event = "" if stream is None else f", d{stream}.record()"
                self.line(f"emit({signal}{event})")
            for signal, stream in signals.overlap.marks.get(step, ()):
                for other in signals.on[step]:
                    if other != stream:
                        self.line(f"d{stream}.wait(d{other}.record())")
                self.line(f"S[{signal}] = d{stream}.record()")

    def write_gathered(self) -> None:
        """Write one sequence call for the gathered steps; for a single step, its own call."""
        steps, released = self.gathering.take()
        # A sequence of one step would cost an additional call.
        if len(steps) == 1:
            self.call(steps[0])
        elif steps:
            calls = [self._names.calls[step] for step in steps]
            slots = [i for call in calls for i in call.runtime]
            name, sequence = self.gathering.add(steps, slots)
            self.text.write(f"{name}({self.names(sequence.slots)})", sequence.steps)
            for step, call in zip(steps, calls, strict=True):
                self.text.write(f"# {call.function}({call.arguments})", step, comment(step))
        if released:
            self.text.write(f"del {self.names(released)}", None)

    def check_for_stop(self, step: Step) -> None:
        self.line("if control.stopped: control.stop()", step)

    def assign(self, pairs: Iterable[tuple[str, str]], step: Step) -> None:
        """Write a simultaneous assignment, so that no right-hand side sees a new value."""
        pairs = [(target, value) for target, value in pairs if target != value]
        if pairs:
            targets, values = (", ".join(side) for side in zip(*pairs, strict=True))
            self.line(f"{targets} = {values}", step)

    def release(self, slots: Sequence[int]) -> None:
        """Write the release of values that were allocated during the run."""
        self.observe_release(slots)
        if self._names.turned:
            slots = [i for i in slots if i not in self._names.turned]
        # Shared slots are entries of the run's list, which other tasks index.
        local = [i for i in slots if i not in self.tasks.shared]
        if self.gathering.steps and local == slots and not any(self.slots[i].owned for i in slots):
            self.gathering.released += local  # views of memory that others own
        elif local:
            self.line(f"del {self.names(local)}")
        shared = [self.name[i] for i in slots if i in self.tasks.shared]
        if shared:
            self.line(f"{' = '.join(shared)} = None")

    def observe_release(self, slots: Iterable[int]) -> None:
        """Write a notification of the observer that the run releases values that it allocated."""
        if self.form.observed:
            counted = [i for i in slots if self.slots[i].owned and self.slots[i].base < 0]
            if counted:
                self.line(f"freed(control, {self.names(counted)})")

    def _observe(self, function: str, step: Step, slots: Sequence[int]) -> None:
        # The line number makes the name unique.
        name = f"n{len(self.text.lines)}"
        self.constants[name] = step
        names = []
        for place, i in enumerate(slots):
            constant = self.slots[i].constant if i >= 0 else None
            names.append(self.name[i] if constant is None else f"{name}_{place}")
            if constant is not None:  # not its contents (``StepInputs``)
                self.constants[names[-1]] = constant
        self.line(f"{function}({', '.join(['control', name, *names])})", step)

    def _kernel(self, step: Step) -> None:
        self.work += self.plan.flops_of[step] or _UNKNOWN_WORK
        if self.work > _CHECK_EVERY:
            self.add_work(0, step)
        joins = self.gathering.enabled and step not in self.tasks.signals.on and is_joinable(step)
        if self.gathering.steps and not joins:
            self.write_gathered()
        if step.into:
            self._results(step)
        if joins:
            self.gathering.steps.append(step)
        else:
            self.call(step)

    def call(self, step: Step) -> None:
        """Write the call of a step's kernel."""
        kernel = step.kernel
        assert kernel is not None
        call = self._names.calls[step].text(self.tasks.signals.on.get(step, ()))
        # The call returns before the kernel has ended.
        if kernel.begin is not None:
            call = self._awaited(call, step)
        if step.into:
            self.line(call, step, comment(step))
            return
        types = [self.slots[i].type for i in step.outputs if i >= 0]
        if any(not isinstance(type_, TensorType) or not type_.shape for type_ in types):
            # NumPy may return a scalar for such a value.
            call = f"array_of({call})" if len(step.outputs) == 1 else f"map(array_of, {call})"
        targets = [self.name[i] if i >= 0 else "_" for i in step.outputs]
        self.line(f"{', '.join(targets) or '_'} = {call}", step, comment(step))
        # An unused result must not live until the next one takes its name.
        if "_" in targets:
            self.line("del _")
        self._keep_up(step)

    def _keep_up(self, step: Step) -> None:
        """Write periodic waits for streams, so that the host is not too far ahead of devices."""
        for stream in self.tasks.signals.on.get(step, ()):
            self._put[stream] += 1
            if self._put[stream] % MOST_AHEAD == 0:
                self.line(f"e = d{stream}.record()")
                self.line("if not e.query(): yield e")

    def _awaited(self, begun: str, step: Step) -> str:
        """Return the expression of the outputs of an asynchronous kernel, begun by the call
        ``begun``. A task yields until they are ready; a single-function program blocks."""
        if self.tasks is not ONE_FUNCTION:
            self.line(f"e = {begun}", step)
            self.line("if not e.query(): yield e", step)
            begun = "e"
        return f"awaited(control, {begun})"

    def _results(self, step: Step) -> None:
        """Write the allocation of destination outputs of ``step`` that leave the run."""
        for i in step.outputs:
            # The caller's array replaces a new one.
            if i in self.given:
                self.text.write(f"{self.name[i]} = {self.given[i]}", step)
            elif i >= 0 and self.slots[i].owned:
                type_ = self.slots[i].type
                assert isinstance(type_, TensorType)
                self.constants[f"k{i}"] = (type_.dims, type_.dtype)
                text = f"empty(*k{i})"
                text = f"keep({text})" if step in self._names.counted else text
                self.text.write(f"{self.name[i]} = {text}", step)

    def _wait(self, step: Step) -> None:
        """Write waits for the signals that a step needs, and for their events; device streams wait
        for events on the device."""
        signals = self.tasks.signals
        for signal in signals.waits.get(step, ()):
            # The complement distinguishes a signal from a block number, which a task yields, too.
            self.line(f"if not S[{signal}]: yield ~{signal}")
            if signal in signals.events and step not in signals.on:
                self.line(f"if not S[{signal}].query(): yield S[{signal}]")
        for stream, signal in signals.behind.get(step, ()):
            self.line(f"d{stream}.wait(S[{signal}])")
        for stream, signal in signals.overlap.awaited.get(step, ()):
            if stream < 0:
                self.wait_if_set(signal, step)
            else:
                self.line(f"if S[{signal}]: d{stream}.wait(S[{signal}])")

    def wait_if_set(self, signal: int, step: Step) -> None:
        """Write a host wait for an event of the previous iteration, if any."""
        self.line(f"if S[{signal}] and not S[{signal}].query(): yield S[{signal}]", step)

    def hand_on(self, loop: Step) -> None:
        """Write the hand-over of an iteration's events to the next; the previous one must have
        ended."""
        overlap = self.tasks.signals.overlap
        self.wait_for_last(loop)
        moved = overlap.moved.get(loop, ())
        self.assign([(f"S[{target}]", f"S[{source}]") for target, source in moved], loop)

    def wait_for_last(self, loop: Step) -> None:
        """Write a host wait for the last iteration whose events were handed over."""
        for signal in self.tasks.signals.overlap.last.get(loop, ()):
            self.wait_if_set(signal, loop)


def comment(step: Step) -> str:
    """Return the origin of a step in the model, as a comment."""
    node = step.node
    text = node.origin or node.name or node.op.name
    return text if text.isprintable() else printable(text)


def printable(text: str) -> str:
    """Return ``text`` without characters that could end a comment: names come from model files."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
