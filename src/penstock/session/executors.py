"""The executors of a session, by subgraph and shapes: compiled, restored, or compiled now."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import WeakMethod, WeakSet, ref

import numpy as np

from penstock.compiler.compiler import AFTER_LOWERING, Compiler
from penstock.compiler.options import is_integer
from penstock.compiler.subgraph import Subgraph
from penstock.compiler.subgraphs import Subgraphs
from penstock.core.errors import (
    InvalidInput,
    InvalidModel,
    LimitExceeded,
    OptionError,
    PenstockError,
    RowsStay,
    Unsupported,
    warn,
)
from penstock.core.records import cached_property, replace
from penstock.core.types import RunValue, RunValues, TensorType, Type, type_of
from penstock.executors.base import CompiledExecutor, Executor
from penstock.executors.control import Control
from penstock.executors.linear import LinearExecutor
from penstock.host import gc_pause
from penstock.host.fork import refuse_reentry
from penstock.host.log import DEBUG, INFO, is_logged, is_traced, log
from penstock.host.malloc import give_back_memory, note_freed
from penstock.host.on_demand import imported
from penstock.ir.graph import Model, clone
from penstock.ops.internal.fused import operation_name
from penstock.plan.plan import StepTable
from penstock.session.plan_cache import PlanCache

if TYPE_CHECKING:
    from penstock.artifact.writer import ArtifactWriter
    from penstock.compiler.options import InputShapes
    from penstock.compiler.padding import PackedSubgraph
    from penstock.compiler.varying_shapes import OpenShapes
    from penstock.session.artifact import Artifact
    from penstock.session.compile_cache import CacheEntry
    from penstock.tuning.run_sampler import MeasuredRuns

_check_dims = imported("penstock.executors.feeds.check_dims")
_feeds_fit = imported("penstock.executors.feeds.feeds_fit")

_AT_EXIT: WeakSet[Executors] = WeakSet()
"""the executors whose plans are kept by default"""

# Without an arena, values of the same rows take memory times up to this factor.
_PACKED = 1.1
# The number of plans after which constants are released less and less often.
_MANY_PLANS = 8
# Bytes of released constants after which free memory is returned to the system.
_MANY_BYTES = 4 << 20


class Executors:
    """The executors of one session. ``artifact``: the saved ones of an opened session; ``entry``:
    where ``cache=`` keeps the session."""

    def __init__(
        self,
        model: Model,
        compiler: Compiler,
        subgraphs: Subgraphs,
        plans: PlanCache,
        artifact: Artifact | None,
        entry: CacheEntry | None,
    ) -> None:
        self._model = model
        self._compiler = compiler
        self._subgraphs = subgraphs
        self._plans = plans
        self._artifact = artifact
        self._entry = entry
        if plans.memory is not None and artifact is not None and artifact.mapping is not None:
            from penstock.executors.pager import Pager, can_page

            unused = plans.memory
            if can_page():
                plans.pager = Pager(artifact.mapping, lambda: unused.unused)
        self._compiled = 0
        self.opened = 0
        """plans that were restored from a file"""
        self._other: ref[Subgraph] | None = None
        self.compiles = True
        """whether runs may compile plans"""

    @property
    def stale(self) -> Sequence[str]:
        """Why saved plans of the session are not used, or missing."""
        if self._artifact is None:
            return ()
        return [*self._artifact.differences, *self._artifact.missing]

    @property
    def latest(self) -> Executor:
        """The executor that was used last for the model's outputs, or else for other values. It is
        compiled now if there is none and all dims are known before a run."""
        main = self._subgraphs.main
        if main.last.executor is not None:
            return main.last.executor
        other = None if self._other is None else self._other()
        if other is not None and other.last.executor is not None:
            return other.last.executor
        # Some dims are open, so there are no shapes to compile a plan for.
        if not all(isinstance(t, TensorType) and t.static for t in main.types):
            raise InvalidInput("no plan yet: run the session, or compile it with shapes=...")
        return self._ahead({})

    def compile_ahead(self, shapes: InputShapes | Sequence[InputShapes] | None) -> None:
        """Compile the plans that ``shapes=`` asks for."""
        for input_shapes in (shapes,) if isinstance(shapes, Mapping) else shapes or ():
            self._ahead(input_shapes)

    def freeze(self, has_plans: bool) -> None:
        """Compile no plans in runs from now on. If there is none yet, compile the plan of fixed
        dims. Raises ``OptionError`` if dims are open."""
        has_plans = has_plans or (self._artifact is not None and self._artifact.has_plans)
        if not has_plans and not self.compile_fixed():
            reason = "dims of inputs are open: say in shapes= what to compile"
            reason = "; ".join([reason, *self.stale])
            raise OptionError(f"compile_in_run=False compiles no plan in a run, and {reason}")
        self.compiles = False

    def compile_fixed(self) -> bool:
        """Compile the plan of the model's outputs now rather than in the first run. Return whether
        that was possible: all input dims must be fixed, and the plan not on a cluster."""
        # Plans of a cluster are sent to its workers, which is left to the first run.
        on_cluster = self._compiler.context.options.cluster is not None
        fixed = not on_cluster and all(map(_is_fixed, self._subgraphs.main.types))
        if fixed:
            self._ahead({})
        return fixed

    def _ahead(self, shapes: InputShapes) -> Executor:
        """Compile the plan for inputs of these shapes ahead of the first run."""
        values = self.values_of(shapes)
        main = self._subgraphs.main
        return self.get(main, main.key(values), values, exact=True)

    def values_of(self, shapes: InputShapes) -> list[Any]:
        """Return values of the main inputs with these shapes, which share one element of memory.
        Inputs that are not named have the shapes that the model declares."""
        main = self._subgraphs.main
        sizes = _sizes(main.types, shapes)
        for name in sorted(set(shapes) - set(main.names) - sizes.keys()):
            self._subgraphs.value(name, "feed")
            raise InvalidInput(f"shapes= has {name!r}, which is not an input of the model")
        values = []
        for name, input_type in zip(main.names, main.types, strict=True):
            if not isinstance(input_type, TensorType) or input_type.dtype is None:
                raise InvalidInput(f"input {name!r}: shapes= needs a tensor, not {input_type}")
            dims: Any = input_type.shape
            if name in shapes and name not in sizes:
                dims = shapes[name]
            elif dims is not None:
                dims = [sizes.get(dim, dim) for dim in dims]
            shape = () if dims is None else tuple([d for d in dims if _is_dim(d)])
            if dims is None or len(shape) < len(dims):
                message = f"input {name!r} of type {input_type}: shapes= must say every dim"
                raise InvalidInput(message)
            try:
                values.append(np.broadcast_to(np.zeros((), input_type.dtype), shape))
            except ValueError as error:
                raise InvalidInput(f"input {name!r}: no array has shape {shape}") from error
        return values

    def get(
        self, subgraph: Subgraph, key: tuple[Hashable, ...], values: RunValues, exact: bool = False
    ) -> Executor:
        """Return the executor for these values, compiled if it is new, and for no other shapes if
        ``exact``. A batch that does not fit into the session's memory runs in parts."""
        if self._plans.memory is None:
            return self._whole(subgraph, key, values, exact)
        base = subgraph.base or subgraph
        try:
            # Packed values have dims known only in the run, but never more than the whole batch.
            if base is subgraph:
                return self._parts(base, values) or self._whole(base, key, values, exact)
            return self._packed(cast("PackedSubgraph", subgraph), base, values, exact)
        except LimitExceeded as error:
            return self._in_parts(base, values, error, exact)

    def _packed(
        self, subgraph: PackedSubgraph, base: Subgraph, values: RunValues, exact: bool
    ) -> Executor:
        """Return the executor of ``base`` without hidden rows. Raises ``LimitExceeded``."""
        from penstock.executors.session_memory import PlanTooLarge

        key = subgraph.key(values)
        most = subgraph.most_bytes(key)
        if not most or key in subgraph.stays:
            executor = self._parts(base, values) or self._whole(base, key, values, exact)
            if not isinstance(executor, CompiledExecutor) or key in subgraph.stays:
                return executor  # parts request plans themselves
            most = int(executor.needs_bytes * _PACKED)
            try:
                self._plans.check(executor, most)
            except PlanTooLarge as error:
                # Parts without hidden rows take less time than all parts with them.
                memory = self._plans.memory
                if memory is not None and not memory.in_parts:
                    with suppress(LimitExceeded):
                        return self._in_parts(base, values, error, exact)
                subgraph.stays.add(key)
                return executor
            subgraph.fits(key, most)
        packed = self._whole(subgraph, key, values, exact)
        if isinstance(packed, CompiledExecutor):
            try:
                self._plans.check(packed, most)
            except PlanTooLarge:  # its plan needs more than the plan for all rows
                subgraph.stays.add(key)
                self._plans.forget(subgraph, key)
                return self._whole(base, base.key(values), values, exact)
            if not isinstance(packed, LinearExecutor) or not _is_pure(packed.table):
                subgraph.stays.add(key)  # a run that then needs more could not be restarted
                return self._whole(base, base.key(values), values, exact)
            self._plans.expect(packed, most)
            if packed.fallback is None:
                packed.fallback = partial(_anew, WeakMethod(self._padded), ref(base))
        return packed

    def _padded(self, base: Subgraph, values: RunValues, control: Control) -> tuple[RunValue, ...]:
        """Run all rows of a batch whose packed rows did not fit into memory: values without an
        arena do not share memory."""
        packed = self._subgraphs.packed(base, values)
        key = packed.key(values)
        if packed is not base:
            cast("PackedSubgraph", packed).stays.add(key)
        control.budget = None
        return self._whole(base, base.key(values), values).run(values, control)

    def _parts(self, subgraph: Subgraph, values: RunValues) -> Executor | None:
        """Return the executor that runs batches of these values in parts, or None."""
        return self._plans.find(subgraph, _parts_key(subgraph, values))

    def _part(self, subgraph: Subgraph, values: RunValues) -> Executor:
        """Return the executor of a part of a batch, without rows that a mask hides."""
        own, last = self._subgraphs.packed(subgraph, values), subgraph.last
        executor = self.get(own, own.key(values), values)
        subgraph.last = last  # the whole batch counts as the plan used last
        return executor

    def _whole(
        self, subgraph: Subgraph, key: tuple[Hashable, ...], values: RunValues, exact: bool = False
    ) -> Executor:
        """``get`` for all of the values at once."""
        values = subgraph.placeholders(values)
        # TFLite's dims are those of the converter's example, and its runtime lets callers change
        # them.
        if self._model.resizable and not _feeds_fit(subgraph.inputs, values):
            feeds = dict(zip(subgraph.names, values, strict=True))
            subgraph = self._resized.resolve(feeds, subgraph.outputs, None)[0].subgraph
        may_compile = exact or self.compiles
        if subgraph.packs and not may_compile and not self._plans.has(subgraph, key):
            subgraph = subgraph.base or subgraph
        # A plan for many shapes pays off for shapes that keep coming, not for one that was
        # requested.
        may_open = self.compiles and not exact and self._plans.memory is None
        shapes = self._open_shapes(subgraph, key, values) if may_open else None
        compiled = partial(self._compile, subgraph, values, shapes, may_compile)
        if is_traced():
            from penstock.host.spans import during

            compiled = partial(during, "penstock.compile", compiled)
        if not exact and self._plans.has(subgraph, shapes or key):
            self._plans.hit()
        try:
            executor = self._plans.get(subgraph, shapes or key, False, compiled)
        except Unsupported:  # some operations have kernels only for known dims
            if shapes is None:
                raise
            # A kernel needs the dims that were left open, so compile for exact shapes from now on.
            subgraph.varying.fixed = True
            return self._whole(subgraph, key, values)
        except RowsStay as reason:
            log(INFO, "rows that a mask hides are computed: %s", reason)
            base = cast("PackedSubgraph", subgraph).refuse(reason)
            return self._whole(base, base.key(values), values)
        if subgraph is not self._subgraphs.main:
            self._other = ref(subgraph)  # weak, so that subgraphs no longer in use are freed
        if self._entry is not None and self._entry.unsaved:
            if self._entry.by_default:
                _AT_EXIT.add(self)
            elif self._compiled.bit_count() == 1:  # less and less often, as it writes all plans
                self.keep()
        return executor

    def _in_parts(
        self, subgraph: Subgraph, values: RunValues, error: LimitExceeded, exact: bool
    ) -> Executor:
        """Return an executor that runs a batch in parts that fit. Raises ``LimitExceeded`` if none
        fit, or if parts are not proven to give the results of the whole batch."""
        from penstock.compiler.parts import batch_of, check_parts, part_of
        from penstock.executors.session_memory import PlanTooLarge
        from penstock.session.parts import PartsExecutor, results_of_all

        batch, samples = batch_of(subgraph, values)
        memory, parts_executor = self._plans.memory, None
        assert memory is not None
        find = partial(_anew, WeakMethod(self._part), ref(subgraph))
        # Parts of one row would have other graphs, since dims of 1 are special.
        least, rows = 2, samples // 2
        if isinstance(error, PlanTooLarge):
            rows = int(samples * error.left / (error.needed * _PACKED))
        while parts_executor is None:
            if samples <= least:
                raise error
            rows = ceil(samples / ceil(samples / min(max(rows, least), samples - 1)))
            some = part_of(values, batch, 0, rows)
            try:
                parts = check_parts(self._compiler, subgraph, values, batch, rows)
                part = self._whole(subgraph, subgraph.key(some), some, exact)
                assert isinstance(part, CompiledExecutor)  # ``check_use`` rejects other executors
                parts_executor = PartsExecutor(part, find, memory, parts)
                self._plans.check(part, parts_executor.needs_bytes)
            except PlanTooLarge as larger:
                # The results of all rows need the same memory whatever the size of parts.
                results = results_of_all(larger.table, samples, rows) if larger.table else 0
                needed = larger.needed + (results if parts_executor is None else 0)
                self._plans.forget(subgraph, subgraph.key(some))
                if rows == least:
                    too_large = PlanTooLarge(larger.limit, larger.held, needed)
                    raise LimitExceeded(f"{too_large} in parts of {rows} rows") from None
                most = rows * (larger.left - results) / max(needed - results, 1)
                rows, parts_executor = min(rows - 1, int(most)), None
            except LimitExceeded:  # raised for ``Limits``, without further details
                if rows == least:
                    raise
                rows //= 2
            except RowsStay as reason:
                message = f"{error}. The batch is not run in parts: {reason}"
                raise LimitExceeded(message) from None
        executor: Executor = parts_executor
        return self._plans.get(subgraph, _parts_key(subgraph, values), False, lambda: executor)

    def _open_shapes(
        self, subgraph: Subgraph, key: tuple[Any, ...], values: RunValues
    ) -> OpenShapes | None:
        """Return the open shapes of a plan that serves these values and others, or None for a plan
        of their own. Raises ``InvalidInput`` if such a plan fits but dims are not as declared."""
        # Shapes that have a plan of their own keep it, since it is the fastest.
        if subgraph.depends_on_dtypes or self._plans.has(subgraph, key):
            return None
        main = subgraph is self._subgraphs.main
        if main and self._artifact is not None and self._artifact.has(key):
            return None
        context = self._compiler.context
        if context.executor not in AFTER_LOWERING or subgraph.framed:
            return None
        if context.options.reproducible:  # plans with open dims use other kernels
            return None
        if subgraph.first is None:  # a single set of shapes does not vary
            subgraph.first = key
            return None
        shapes = subgraph.varying.open(key, self._plans.hits)
        if shapes is None or subgraph.needs_dims:
            return None
        if not shapes.agree(key):
            _check_dims(subgraph.graph.inputs, values)
        return shapes

    @cached_property
    def _resized(self) -> Subgraphs:
        """Return the subgraphs for inputs of other shapes than the model declares."""
        graph = clone(self._subgraphs.graph)
        for value in graph.inputs:
            value.type = TensorType(value.dtype)
        return Subgraphs(lambda: graph, self._model.aliases, self._compiler, self._plans.drop)

    @gc_pause.paused()
    def _compile(
        self,
        subgraph: Subgraph,
        values: Sequence[Any],
        shapes: OpenShapes | None = None,
        may_compile: bool = True,
    ) -> Executor:
        self._compiled += 1
        begin = perf_counter()
        if self._model.check_types is not None and subgraph.depends_on_dtypes:
            fed = dict(zip(subgraph.names, map(type_of, values), strict=True))
            try:
                self._model.check_types(self._model.graph, fed)
            except InvalidModel as error:
                raise InvalidInput(f"the model takes no feeds of these dtypes: {error}") from error
        executor = None
        types = None if shapes is None else shapes.types(subgraph.graph.inputs, values)
        # Only the plans of the main subgraph are saved, each for exact shapes.
        if types is None and self._artifact is not None and subgraph is self._subgraphs.main:
            try:
                executor = self._artifact.restored(self._compiler, subgraph.key(values), values)
            except InvalidModel:
                if self._entry is None:
                    raise
                # The user did not ask for this cached plan, so compile it again.
                self._entry.remove()
                self._artifact = None
            self.opened += executor is not None
        if executor is None:
            if not may_compile:
                raise self._no_plan(subgraph, values)
            executor = self._compiler.compile(subgraph, values, types)
            expects = types is not None and bool(types.later)
            if expects and isinstance(executor, LinearExecutor):
                executor.sampler = None  # it might choose another executor
                executor.fallback = partial(_anew, WeakMethod(self._expect_nothing), ref(subgraph))
            elif types is not None and expects:  # other executors cannot restart a run
                executor = self._compiler.compile(subgraph, values, replace(types, later=()))
            if types is None and self._entry is not None and subgraph is self._subgraphs.main:
                self._entry.unsaved += 1
        if isinstance(executor, CompiledExecutor) and executor.sampler is not None:
            self._own(executor)
        self._release(executor)
        if is_logged(INFO):
            self._log(executor, perf_counter() - begin)
        return executor

    def _own(self, executor: CompiledExecutor) -> None:
        """Let the sampler of an executor's runs recompile its plan, if runs may compile."""
        # Plans on trial beside the one in use would hold arenas of their own.
        if not self.compiles or self._plans.memory is not None:
            executor.sampler = None
        elif executor.sampler is not None:
            # Weak references, since plans hold executors and this object holds plans.
            executor.sampler.owner = ref(self)

    def _no_plan(self, subgraph: Subgraph, values: RunValues) -> InvalidInput:
        """Return the error for a run without a plan when runs may not compile one. Raises
        ``InvalidInput`` for values that no plan would accept."""
        _check_dims(subgraph.graph.inputs, values)
        main = self._subgraphs.main
        named = list(zip(subgraph.names, values, strict=True))
        fed = ", ".join([f"{name}: {type_of(value)}" for name, value in named])
        dims = [f"{n!r}: {value.shape}" for n, value in named if isinstance(value, np.ndarray)]
        ahead = f"compile one ahead, with shapes={{{', '.join(dims)}}}"
        # Shapes other than a TFLite file declares belong to another graph with other ports.
        if (subgraph.names, subgraph.outputs) != (main.names, main.outputs):
            ahead = "plans are compiled ahead for the model's own inputs and outputs alone"
        return InvalidInput(f"there is no plan for ({fed}), and compile_in_run=False: {ahead}")

    def _release(self, executor: Executor) -> None:
        """Release what only compiling needed."""
        # Most sessions have one plan. Another plan reads constants again, which takes time, so they
        # are released less and less often.
        count = self._compiled
        once = count == 1 or (count >= _MANY_PLANS and count.bit_count() == 1)
        once |= self._plans.memory is not None
        if once:
            note_freed(self._release_constants(executor), _MANY_BYTES)
        # After its only plan, all modules imported for it are young objects as well.
        if count > 1 and self._may_untrack(executor):
            from penstock.host.collector import untrack

            untrack(executor)

    def _release_constants(self, executor: Executor) -> int:
        """``release_constants``, also for weights of the file from which the session was opened."""
        freed = release_constants(executor.table)
        if self._artifact is not None:
            self._artifact.release()
        return freed

    def _may_untrack(self, executor: Executor) -> bool:
        """Whether reference counts alone free the plan of ``executor``: user-defined kernels may
        refer to the session, and objects on devices to anything."""
        if not isinstance(executor, CompiledExecutor) or not self._compiler.context.one_memory:
            return False
        contracts = [step.contract for step in executor.table.walk()]
        return not any(contracts)

    def replace(self, old: Executor, new: Executor) -> None:
        """Use another executor of the same plan from now on, since runs have shown it is faster."""
        self._plans.replace(old, new)

    def reschedule(self, executor: Executor, measured: MeasuredRuns) -> Executor | None:
        """Recompile the plan of an executor with costs that its runs measured: on frames if
        iterations of loops may overlap, or on tasks. Return None if neither should be faster."""
        from penstock.compiler.scheduling import long_nodes

        long = long_nodes(measured, self._compiler.context)
        subgraph = self._plans.subgraph_of(executor) if long else None
        if subgraph is not None and subgraph.extract is not None and not self._model.resizable:
            from penstock.compiler.varying_shapes import OpenTypes

            compiler, plan = self._compiler.knowing(long), measured.plan
            # Frames were raised before shapes were known, so the graph is extracted from the model
            # again.
            framed = self._subgraphs.extracted(subgraph.extract, compiler)
            if framed.framed:
                # The same types as those of the plan in use, whose feeds are no longer alive.
                types = OpenTypes([plan.slots[i].type for i in plan.inputs])
                return compiler.compile(framed, open_types=types)
        return self._compiler.reschedule(measured)

    def _log(self, executor: Executor, seconds: float) -> None:
        """Log a plan that was compiled, and where its steps run."""
        from penstock.session.facts import effective_options

        table, context = executor.table, self._compiler.context
        ports = ", ".join([f"{table.slots[i].name}: {table.slots[i].type}" for i in table.inputs])
        about = effective_options(context, executor).line(context.options)
        message = "compiled a plan of %r for (%s) in %.1f ms: %s"
        log(INFO, message, table.name, ports, 1e3 * seconds, about)
        if is_logged(DEBUG):
            placed = Counter((operation_name(s.node), s.backend) for s in table.walk() if s.backend)
            for (operation, backend), count in sorted(placed.items()):
                log(DEBUG, "%s on %s: %d steps", operation, backend, count)

    def _expect_nothing(
        self, subgraph: Subgraph, values: RunValues, control: Control
    ) -> tuple[RunValue, ...]:
        """Run with a plan that predicts no dims that inference leaves open."""
        # Predicted dims have changed once and may change again.
        subgraph.varying.forget()
        self._plans.drop(subgraph)  # its other open plans may predict wrong dims as well
        return self.get(subgraph, subgraph.key(values), values).run(values, control)

    def adopt(self, model: Model, subgraphs: Subgraphs) -> None:
        """Compile plans of another model with the same inputs and outputs from now on. That model
        is neither in the file nor in the cache."""
        self._artifact, self._entry, self._other = None, None, None
        self._model, self._subgraphs = model, subgraphs
        self.__dict__.pop("_resized", None)

    def release(self) -> None:
        """Drop contents of constants that were read again and that kernels hold as well."""
        for executor in self._plans.executors():
            release_constants(executor.table)

    def write(self, write: Callable[[ArtifactWriter], None]) -> None:
        """Let ``write`` write the session."""
        from penstock.artifact.writer import ArtifactWriter

        self._write(write, ArtifactWriter())

    def _write(
        self,
        write: Callable[[ArtifactWriter], None],
        writer: ArtifactWriter,
        keys: Sequence[object] = (),
    ) -> None:
        """Let ``write`` write the session; ``writer`` has the model and plans of these ``keys``."""
        from penstock.session.saving import save_session

        main, context = self._subgraphs.main, self._compiler.context
        # A process that opens the session may never see the shapes that varied in this one.
        plans = {k: plan for k, plan in self._plans.of(main).items() if isinstance(k, tuple)}
        if writer.most_plans is not None:  # prefer the plans that were used last
            plans = dict(reversed(plans.items()))
        save_session(self._model, context, main, plans, writer, keys)
        write(writer)
        if context.executor in AFTER_LOWERING:
            for executor in plans.values():  # writing has restored their constants
                release_constants(executor.table)

    def keep(self) -> None:
        """Keep the session in the compile cache, if possible."""
        entry = self._entry
        if entry is None or not entry.unsaved:
            return
        # Set first: if saving fails, it is not tried again after each plan.
        entry.unsaved = 0
        try:
            writer = entry.writer()
            keys = () if self._artifact is None else self._artifact.copy_into(writer)
            if len(keys) != writer.most_plans:
                self._write(entry.save, writer, keys)
        except (OSError, PenstockError) as error:
            self._entry = None
            if not entry.by_default:
                warn(f"cache= keeps no session: {error}")

    def __del__(self) -> None:
        # The session was dropped without being closed.
        entry = getattr(self, "_entry", None)  # missing if the constructor has failed
        if entry is not None and entry.unsaved:
            with suppress(PenstockError):  # the collector may run while a lock is held
                refuse_reentry()
                self.keep()

    def trim(self) -> None:
        """Release memory that no run holds (``Session.trim``)."""
        for executor in self._plans.executors():
            executor.trim()
            release_constants(executor.table)
        self.save_memory()

    def save_memory(self) -> None:
        """Release what backends keep for later plans, and memory that the process has freed."""
        for backend in self._compiler.context.backends:
            backend.save_memory()
        give_back_memory()


def _is_pure(table: StepTable) -> bool:
    """Whether a run has no effects besides its results, so that it may be restarted."""
    return all(step.node.op.pure for step in table.walk())


def _parts_key(subgraph: Subgraph, values: RunValues) -> str:
    """Return the key of the executor for parts; a string, so that it is not saved."""
    return f"parts of {subgraph.key(values)}"


def _anew(method: WeakMethod[Any], subgraph: ref[Subgraph], *arguments: RunValue) -> Any:
    """Call a method of a session that still exists, as all sessions with runs do."""
    begin, own = method(), subgraph()
    if begin is None or own is None:
        raise PenstockError("the session is closed")
    return begin(own, *arguments)


def _sizes(types: Sequence[Type], shapes: InputShapes) -> dict[str, int]:
    """Return the sizes of dims that ``shapes=`` names. ``InvalidInput``: a name of no dim."""
    sizes = {name: n for name, n in shapes.items() if is_integer(n)}
    # Most callers name inputs.
    if not sizes:
        return sizes
    declared = [t.shape for t in types if isinstance(t, TensorType) and t.shape]
    named = {dim for shape in declared for dim in shape if isinstance(dim, str)}
    for name, size in sizes.items():
        if name not in named or size < 0:
            names = ", ".join(map(repr, sorted(named))) or "none"
            raise InvalidInput(
                f"shapes= says {name!r}: {size}, but numbers from 0 are for dims with a name, "
                f"of which the model has {names}; inputs take a list of dims"
            )
    return sizes


def _is_dim(dim: object) -> TypeGuard[int]:
    return is_integer(dim) and int(dim) >= 0


def _is_fixed(type_: Type) -> bool:
    """Whether values of a type have one shape and dtype."""
    if not isinstance(type_, TensorType) or type_.dtype is None or type_.shape is None:
        return False
    return all(isinstance(dim, int) for dim in type_.shape)


def release_constants(table: StepTable) -> int:
    """Drop the contents of constants that all steps of ``table`` read in packed order, after its
    program was bound to memory. Later readers get them back from the kernels. Return about how
    many bytes that frees unless another object holds them."""
    give_back: dict[int, Callable[[], np.ndarray]] = {}
    read = set(table.outputs)
    for step in table.walk():
        kernel = step.kernel
        release = None if kernel is None else kernel.packed.release
        held: Mapping[int, Callable[[], np.ndarray]] = {}
        if release is not None and table.packed_inputs(step):
            held = release()
        for i, slot in enumerate(step.inputs):
            if i in held:
                give_back[slot] = held[i]
            else:
                read.add(slot)
        for block in step.blocks:
            read.update(block.outputs)
    freed = 0
    for index in give_back.keys() - read:
        constant = table.slots[index].constant
        if constant is not None and constant.held is not None:
            freed += constant.held.nbytes
            constant.release(give_back[index])
    return freed


@atexit.register
def _keep_all() -> None:
    for executors in list(_AT_EXIT):
        executors.keep()
