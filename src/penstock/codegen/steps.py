"""Writes the steps of a block: kernel calls, signals, releases, and calls of the observer."""

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

# Estimated operations between two checks for a stop: a few milliseconds of NumPy on one core.
_CHECK_EVERY = 50_000_000
# The estimate for a step of unknown shapes.
_UNKNOWN_WORK = 1_000_000
COMMENT_COLUMN = 60
"""where comments begin"""

ControlFlowWriter: TypeAlias = "Callable[[StepWriter, Step], None]"


@dataclass(frozen=True)
class ProgramForm:
    """The form of a program of a plan.

    If ``observed``, it calls the control's observer for each step, with its inputs if they are
    ``inputs_observed``, else with none. The outputs ``given``, by number, are written into arrays
    that callers give. ``capture``: whether steps on devices that can are captured into graphs.
    """

    observed: bool = False
    inputs_observed: bool = True
    given: tuple[int, ...] = ()
    capture: bool = True


class SourceText:
    """Lines of Python. ``step_of_line[i]`` is the step that line i runs, if any, or those of a
    sequence or of a captured graph; ``depth`` is how far the next line is indented."""

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
    """Writes steps that a device captures into graphs (``codegen.captures``)."""

    def pieces(self, steps: Sequence[Step], counted: Collection[Step]) -> Iterable[list[Step]]:
        """The steps of a block, those together that one graph has."""

    def write(self, writer: StepWriter, steps: Sequence[Step]) -> None:
        """Write a call of a graph."""


class StepWriter:
    """Writes steps as ``text``. ``control_flow`` writes an If or a loop, and calls ``block`` for
    the blocks in it, ``graphs`` what a device captures. If the ``form`` is observed, each step
    stands between calls of the run's observer.

    ``constants`` are values that names in the text stand for, the same in every arena; ``given``
    names the arrays of callers that slots are written into. ``loops`` is the number of loops around
    the line at hand; ``work`` the estimated operations since the last check for a stop; ``counts``
    whether the program's runs count what they allocate; ``max_iterations`` the limit of a loop's.
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
        self._put: dict[int, int] = defaultdict(int)  # steps on streams of devices

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        """Write a line, behind the steps that have been gathered for a sequence."""
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
        """The steps of one block, or of one task; values are released after their last use."""
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
        """Check for a stop before ``step``, if there were many operations since the last check."""
        self.work += operations
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.check_for_stop(step)

    def _steps(self, steps: Sequence[Step]) -> None:
        observed, signals = self.form.observed, self.tasks.signals
        for step in with_checkpoints(steps):
            if step.outputs and step.outputs[0] in self._names.turned:
                continue
            # In this order: observers get the time of the kernel alone, and values go when
            # nothing reads them any more.
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
        """One call for the steps that have been gathered; for a single one its own."""
        steps, released = self.gathering.take()
        # A call of one step through a sequence would cost a call more.
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
        """Assign all at once, so that no right-hand side sees a new value."""
        pairs = [(target, value) for target, value in pairs if target != value]
        if pairs:
            targets, values = (", ".join(side) for side in zip(*pairs, strict=True))
            self.line(f"{targets} = {values}", step)

    def release(self, slots: Sequence[int]) -> None:
        """Release values that were allocated during the run."""
        self.observe_release(slots)
        if self._names.turned:
            slots = [i for i in slots if i not in self._names.turned]
        # Shared slots are entries of the run's list, which other tasks index.
        local = [i for i in slots if i not in self.tasks.shared]
        if self.gathering.steps and local == slots and not any(self.slots[i].owned for i in slots):
            self.gathering.released += local  # views of what others own
        elif local:
            self.line(f"del {self.names(local)}")
        shared = [self.name[i] for i in slots if i in self.tasks.shared]
        if shared:
            self.line(f"{' = '.join(shared)} = None")

    def observe_release(self, slots: Iterable[int]) -> None:
        """Tell the observer that values are no longer the run's, as far as it allocated them."""
        if self.form.observed:
            counted = [i for i in slots if self.slots[i].owned and self.slots[i].base < 0]
            if counted:
                self.line(f"freed(control, {self.names(counted)})")

    def _observe(self, function: str, step: Step, slots: Sequence[int]) -> None:
        # The line number makes names that differ.
        name = f"n{len(self.text.lines)}"
        self.constants[name] = step
        arguments = ", ".join(["control", name, *[self.name[i] for i in slots]])
        self.line(f"{function}({arguments})", step)

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
        """The call of a step's kernel."""
        kernel = step.kernel
        assert kernel is not None
        call = self._names.calls[step].text(self.tasks.signals.on.get(step, ()))
        # Its call returns before the kernel has ended.
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
        """Wait for streams now and then, so that the host is not too far ahead of devices."""
        for stream in self.tasks.signals.on.get(step, ()):
            self._put[stream] += 1
            if self._put[stream] % MOST_AHEAD == 0:
                self.line(f"e = d{stream}.record()")
                self.line("if not e.query(): yield e")

    def _awaited(self, begun: str, step: Step) -> str:
        """The outputs of an asynchronous kernel that the call ``begun`` begins. A task steps aside
        until they come; the program of a plan that is one function waits."""
        if self.tasks is not ONE_FUNCTION:
            self.line(f"e = {begun}", step)
            self.line("if not e.query(): yield e", step)
            begun = "e"
        return f"awaited(control, {begun})"

    def _results(self, step: Step) -> None:
        """Allocate the outputs that the kernel of ``step`` is given though they leave the run."""
        for i in step.outputs:
            # The caller's array takes the place of a new one.
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
        """Wait for the signals that a step needs, and for the work that their events stand for:
        streams of a device do so there."""
        signals = self.tasks.signals
        for signal in signals.waits.get(step, ()):
            # The complement tells a signal from the number of a block, which a task yields, too.
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
        """Wait on the host for an event of an iteration before, if there was one."""
        self.line(f"if S[{signal}] and not S[{signal}].query(): yield S[{signal}]", step)

    def hand_on(self, loop: Step) -> None:
        """Hand the events of an iteration to the next: the one before it must have ended."""
        overlap = self.tasks.signals.overlap
        self.wait_for_last(loop)
        moved = overlap.moved.get(loop, ())
        self.assign([(f"S[{target}]", f"S[{source}]") for target, source in moved], loop)

    def wait_for_last(self, loop: Step) -> None:
        """Wait on the host for the end of the last iteration whose events were handed on."""
        for signal in self.tasks.signals.overlap.last.get(loop, ()):
            self.wait_if_set(signal, loop)


def comment(step: Step) -> str:
    """The place in the model that a step comes from."""
    node = step.node
    text = node.origin or node.name or node.op.name
    return text if text.isprintable() else printable(text)


def printable(text: str) -> str:
    """``text`` without characters that could end a comment: names come from model files."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
