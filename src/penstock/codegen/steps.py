"""Writes the steps of a block: kernel calls, signals, releases, and calls of the observer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.codegen.lifetimes import Lifetimes
from penstock.codegen.names import MOST_AHEAD, ProgramNames, runtime_slots
from penstock.codegen.sequences import CallSequence, is_joinable
from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.host.native import library
from penstock.host.on_demand import imported
from penstock.ops.work_estimate import flops
from penstock.plan.plan import Plan, SlotKind, Step
from penstock.plan.tasks import NO_SIGNALS, Tasks

if TYPE_CHECKING:
    from penstock.codegen.captures import CapturedSteps

# Of plans on devices.
_CAPTURED_STEPS: Callable[..., CapturedSteps] = imported("penstock.codegen.captures.CapturedSteps")
_PIECES: Callable[..., Iterator[list[Step]]] = imported("penstock.codegen.captures.capture_groups")
_READ_AT_ONCE: Callable[[Plan], set[int]] = imported("penstock.codegen.captures.read_at_once")

# Estimated operations between two checks for a stop: a few milliseconds of NumPy on one core.
_CHECK_EVERY = 50_000_000
# The estimate for a step of unknown shapes.
_UNKNOWN_WORK = 1_000_000
COMMENT_COLUMN = 60
"""where comments begin"""

ControlFlowWriter: TypeAlias = "Callable[[StepWriter, Step], None]"


class StepWriter:
    """Writes steps as ``lines`` of Python. ``control_flow`` writes an If or a loop, and calls
    ``block`` for the blocks in it. If ``observed``, each step stands between calls of the run's
    observer.

    ``step_of_line[i]`` is the step that line i runs, if any, or those of one of the ``sequences``,
    by name; ``constants`` are values that names in the text stand for, the same in every arena.
    ``given`` names the arrays of callers that slots are written into. ``loops`` is the number of
    loops around the line at hand; ``work`` the estimated operations since the last check for a
    stop; ``counts`` whether the program's runs count what they allocate.
    """

    def __init__(
        self,
        plan: Plan,
        names: ProgramNames,
        lifetimes: Lifetimes,
        control_flow: ControlFlowWriter,
        max_iterations: int | None,
        tasks: Tasks | None,
        observed: bool,
        capture: bool = True,
        inputs_observed: bool = True,
    ) -> None:
        self.plan = plan
        self.slots = plan.slots
        self.name = names.slots
        self.lines: list[str] = []
        self.step_of_line: list[Step | Sequence[Step] | None] = []
        self.constants: dict[str, Any] = {}
        self.depth = 0
        self.lifetimes = lifetimes
        self.max_iterations = max_iterations
        self.observed = observed
        self._inputs_observed = inputs_observed
        self.counts = False
        self.given: Mapping[int, str] = {}
        self.in_tasks = tasks is not None
        self.expanded: Mapping[Step, Sequence[int]] = {} if tasks is None else tasks.expanded
        self.loops = 0
        self.work = 0
        self._calls = names.calls
        self._counted = names.counted
        self._control_flow = control_flow
        self._shared = frozenset() if tasks is None else tasks.shared
        self._signals = NO_SIGNALS if tasks is None else tasks.signals
        self._checks: dict[object, str] = {}
        self.sequences: dict[str, CallSequence] = {}
        self._captures = bool(plan.captures) and capture and not observed and tasks is None
        self.captures: dict[str, CapturedSteps] = {}
        self.bodies: list[tuple[list[str], list[Step | Sequence[Step] | None]]] = []
        self._at_once = _READ_AT_ONCE(plan) if self._captures else set()
        self._gathers = not observed and library() is not None
        self._gathered: list[Step] = []
        self._released: list[int] = []  # behind these
        self._put: dict[int, int] = defaultdict(int)  # steps on streams of devices

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        """Write a line, behind the steps that have been gathered for a sequence."""
        if self._gathered:
            self._write_gathered()
        self._write(text, step, comment)

    def _write(self, text: str, step: Step | Sequence[Step] | None, comment: str = "") -> None:
        text = "    " * self.depth + text
        self.lines.append(f"{text:<{COMMENT_COLUMN}}  # {comment}" if comment else text)
        self.step_of_line.append(step)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def names(self, slots: Iterable[int]) -> str:
        return ", ".join([self.name[i] for i in slots])

    def block(self, steps: Sequence[Step]) -> None:
        """The steps of one block, or of one task; values are released after their last use."""
        if self._captures:
            for piece in _PIECES(self.plan, steps, self._counted):
                if len(piece) > 1:
                    self._captured(piece)
                else:
                    self._steps(piece)
        else:
            self._steps(steps)
        self._write_gathered()

    def _captured(self, steps: Sequence[Step]) -> None:
        """A call of a graph, and its body, the function that is captured."""
        made = [i for step in steps for i in step.outputs if i >= 0 and self._is_variable(i)]
        released = [i for step in steps for i in self.lifetimes.after.get(step, ())]
        read = dict.fromkeys(i for step in steps for i in runtime_slots(self.plan, step))
        inputs = [i for i in read if i not in made]
        outputs = [i for i in made if i not in released]
        fresh = [i not in self._at_once for i in outputs]
        number = len(self.captures)
        self.captures[f"graph_{number}"] = _CAPTURED_STEPS(steps, inputs, outputs, fresh)
        self.work += sum([flops(step.node) for step in steps])
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.check_for_stop(steps[0])
        targets = f"({self.names(outputs)},) = " if outputs else ""
        call = f"{targets}graph_{number}({self.names(inputs)})"
        self.line(call, comment=f"{len(steps)} steps")
        self.step_of_line[-1] = tuple(steps)
        self.release([i for i in released if i not in made])
        outer = self.lines, self.step_of_line, self.depth, self.work
        self.lines, self.step_of_line, self.depth = [], [], 0
        self.line(f"def body_{number}({self.names(inputs)}):")
        with self.indented():
            for step in with_checkpoints(steps):
                self._call(step)
                gone = [i for i in self.lifetimes.after.get(step, ()) if i in made]
                if gone:
                    self.line(f"del {self.names(gone)}")
            self.line(f"return ({self.names(outputs)}{',' if outputs else ''})")
        self.bodies.append((self.lines, self.step_of_line))
        self.lines, self.step_of_line, self.depth, self.work = outer

    def _is_variable(self, slot: int) -> bool:
        return self.slots[slot].kind is SlotKind.DYNAMIC

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in with_checkpoints(steps):
            self._wait(step)
            self._observe("began", step, step.inputs if self._inputs_observed else ())
            if step.control:
                self._control_flow(self, step)
            else:
                self._kernel(step)
            self._observe("ended", step, step.outputs)
            self.release(self.lifetimes.after.get(step, ()))
            for signal in self._signals.emits.get(step, ()):
                stream = self._signals.events.get(signal)
                event = "" if stream is None else f", d{stream}.record()"
                self.line(f"emit({signal}{event})")
            for signal, stream in self._signals.overlap.marks.get(step, ()):
                for other in self._signals.on[step]:
                    if other != stream:
                        self.line(f"d{stream}.wait(d{other}.record())")
                self.line(f"S[{signal}] = d{stream}.record()")

    def _write_gathered(self) -> None:
        """One call for the steps that have been gathered; for a single one its own."""
        steps, released = self._gathered, self._released
        self._gathered, self._released = [], []
        if len(steps) == 1:
            self._call(steps[0])
        elif steps:
            name = f"sequence_{len(self.sequences)}"
            slots = [i for step in steps for i in runtime_slots(self.plan, step)]
            sequence = CallSequence(tuple(steps), tuple(dict.fromkeys(slots)))
            self.sequences[name] = sequence
            self._write(f"{name}({self.names(sequence.slots)})", sequence.steps)
            for step in steps:
                self._write(f"# {self._calls[step].text()}", step, comment(step))
        if released:
            self._write(f"del {self.names(released)}", None)

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
        if not slots:
            return
        self.observe_release(slots)
        local = [i for i in slots if i not in self._shared]
        if self._gathered and local == slots and not any(self.slots[i].owned for i in slots):
            self._released += local  # views of what others own
        elif local:
            self.line(f"del {self.names(local)}")
        shared = [self.name[i] for i in slots if i in self._shared]
        if shared:
            self.line(f"{' = '.join(shared)} = None")

    def observe_release(self, slots: Iterable[int]) -> None:
        """Tell the observer that values are no longer the run's, as far as it allocated them."""
        if self.observed:
            counted = [i for i in slots if self.slots[i].owned and self.slots[i].base < 0]
            if counted:
                self.line(f"freed(control, {self.names(counted)})")

    def _observe(self, function: str, step: Step, slots: Sequence[int]) -> None:
        if self.observed:
            name = f"n{len(self.lines)}"
            self.constants[name] = step
            arguments = ", ".join(["control", name, *[self.name[i] for i in slots]])
            self.line(f"{function}({arguments})", step)

    def _kernel(self, step: Step) -> None:
        kernel = step.kernel
        assert kernel is not None
        self.work += flops(step.node) or _UNKNOWN_WORK
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.check_for_stop(step)
        joins = self._gathers and step not in self._signals.on and is_joinable(step)
        if self._gathered and not joins:
            self._write_gathered()
        if step.into:
            self._results(step)
        if joins:
            self._gathered.append(step)
        else:
            self._call(step)

    def _call(self, step: Step) -> None:
        kernel = step.kernel
        assert kernel is not None
        call = self._calls[step].text(self._signals.on.get(step, ()))
        if kernel.begin is not None:
            call = self._awaited(call, step)
        if step.into:
            check = None if kernel.binder is None else kernel.binder.check
            if check is not None:
                name = self._checks.setdefault(check, f"check{len(self._checks)}")
                self.constants[name] = check
                call = f"if status := {call}: {name}(status)"
            self.line(call, step, comment(step))
            return
        types = [self.slots[i].type for i in step.outputs if i >= 0]
        if any(not isinstance(type_, TensorType) or not type_.shape for type_ in types):
            # NumPy may return a scalar for such a value.
            call = f"array_of({call})" if len(step.outputs) == 1 else f"map(array_of, {call})"
        targets = [self.name[i] if i >= 0 else "_" for i in step.outputs]
        self.line(f"{', '.join(targets) or '_'} = {call}", step, comment(step))
        if "_" in targets:
            self.line("del _")
        self._keep_up(step)

    def _keep_up(self, step: Step) -> None:
        """Wait for streams now and then, so that the host is not too far ahead of devices."""
        for stream in self._signals.on.get(step, ()):
            self._put[stream] += 1
            if self._put[stream] % MOST_AHEAD == 0:
                self.line(f"e = d{stream}.record()")
                self.line("if not e.query(): yield e")

    def _awaited(self, begun: str, step: Step) -> str:
        """The outputs of an asynchronous kernel that the call ``begun`` begins. A task steps aside
        until they come; the program of a plan that is one function waits."""
        if self.in_tasks:
            self.line(f"e = {begun}", step)
            self.line("if not e.query(): yield e", step)
            begun = "e"
        return f"awaited(control, {begun})"

    def _results(self, step: Step) -> None:
        """Allocate the outputs that the kernel of ``step`` is given though they leave the run."""
        for i in step.outputs:
            if i in self.given:
                self._write(f"{self.name[i]} = {self.given[i]}", step)
            elif i >= 0 and self.slots[i].owned:
                type_ = self.slots[i].type
                assert isinstance(type_, TensorType)
                self.constants[f"k{i}"] = (type_.dims, type_.dtype)
                text = f"empty(*k{i})"
                text = f"keep({text})" if step in self._counted else text
                self._write(f"{self.name[i]} = {text}", step)

    def _wait(self, step: Step) -> None:
        """Wait for the signals that a step needs, and for the work that their events stand for:
        streams of a device do so there."""
        signals = self._signals
        for signal in signals.waits.get(step, ()):
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
        overlap = self._signals.overlap
        self.wait_for_last(loop)
        moved = overlap.moved.get(loop, ())
        self.assign([(f"S[{target}]", f"S[{source}]") for target, source in moved], loop)

    def wait_for_last(self, loop: Step) -> None:
        """Wait on the host for the end of the last iteration whose events were handed on."""
        for signal in self._signals.overlap.last.get(loop, ()):
            self.wait_if_set(signal, loop)


def comment(step: Step) -> str:
    """The place in the model that a step comes from."""
    node = step.node
    return printable(node.origin or node.name or node.op.name)


def printable(text: str) -> str:
    """``text`` without characters that could end a comment: names come from model files."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])
