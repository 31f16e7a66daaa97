"""The options of compiling and of running, each declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from sys import maxsize
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    get_args,
)

import numpy as np

from penstock.core.errors import OptionError, check_choice, check_count, wrong_type
from penstock.core.limits import Limits, parse_bytes
from penstock.core.option_records import option, option_names
from penstock.core.records import KW_ONLY, dataclass, fields, replace
from penstock.core.types import Feeds, NamedValues
from penstock.observers.base import Observer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.base import Backend
    from penstock.core.checkpoints import Progress
    from penstock.executors.control import CancelToken
    from penstock.host.threads import Workers
    from penstock.ir.graph import Model
    from penstock.ops.tensorflow.state import Store
    from penstock.passes.context import AfterPass
    from penstock.plan.grouping import ClusteredGrouping
    from penstock.tuning.measure import CostModel
    from penstock.tuning.worker_placement import WorkerPool

ExecutorName: TypeAlias = Literal[
    "auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret"
]
Precision: TypeAlias = Literal["float32", "tf32", "bf16", "strict"]
MemoryPlanner: TypeAlias = Literal["quick", "best", "wic", "first_fit", "bump"]
InputShapes: TypeAlias = Mapping[str, Sequence[int] | int]
_ELSEWHERE = {
    "providers": (
        'backends= chooses what computes, as in backends=["native", "numpy"]; '
        "penstock.compat.onnxruntime has ONNX Runtime's interface, with providers"
    ),
    "device": (
        'by default the CPU computes, and backends=["torch", "numpy"] computes on a GPU with '
        "PyTorch; devices= are those that nodes of the model name"
    ),
    "batch_size": (
        "a plan is compiled for each size that is fed; shapes= compiles some before the first run, "
        'as in shapes={"x": [8, 3]}, and penstock.Replicas joins requests into batches'
    ),
}
"""how to get what other libraries offer as an option of this name"""
_FLOAT16 = (
    'a model of float16 runs as it is, computed in float32 or, with "strict", rounded after each '
    'operation; "bf16" is faster on processors that support it'
)
_INT8 = (
    "a quantized model runs as it is: penstock.quantize makes one, of samples, as does "
    "onnxruntime.quantization"
)
_PRECISIONS_ELSEWHERE = {
    **dict.fromkeys(("fp16", "float16", "half"), _FLOAT16),
    **dict.fromkeys(("int8", "uint8", "int4"), _INT8),
    "fp32": 'write "float32"',
    "bfloat16": 'write "bf16"',
}
"""how to get precisions by the names that other libraries use for them"""
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Returns: TypeAlias = Literal["numpy", "torch"]
RETURNS: tuple[Returns, ...] = get_args(Returns)
DeadRows: TypeAlias = Literal["exact", "any"]
PACKS: Mapping[DeadRows, str] = {"exact": "proven", "any": "any"}
"""the values of ``PackRows.packs`` for ``dead_rows=``"""


class SharedVariables(Protocol):
    """The variables of a session (``session.variables``), as ``variables=`` takes them."""

    def of(self, model: Model) -> dict[Store, Store]:
        """Return the stores that replace the model's own, by the model's stores."""
        ...


def _check_types(record: ExpertOptions | CompileOptions) -> None:
    """Raise ``TypeError`` for an option of a type that its field does not declare."""
    for own in fields(record):
        value, allowed = getattr(record, own.name), own.metadata["allowed"]
        # The default of most fields is None, which means that no value is given.
        if allowed is not None and value is not own.default and not allowed(value):
            raise wrong_type(own.name, value, str(own.type))


# Comparisons of NumPy arrays return NumPy's own bools.
def _is_flag(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


# Otherwise a single name would pass as a list of one-letter names.
def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _by_name(value: object, allowed: Callable[[object], bool] = lambda _: True) -> bool:
    """Whether ``value`` maps names to allowed values."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and allowed(item) for name, item in value.items()
    )


def _is_place(value: Any) -> bool:
    return isinstance(value, str) or (_is_list(value) and all(isinstance(n, str) for n in value))


def _are_shapes(value: Any) -> bool:
    by_name = partial(
        _by_name, allowed=lambda x: _is_list(x) or isinstance(x, np.ndarray) or is_integer(x)
    )
    return by_name(value) or (_is_list(value) and all(map(by_name, value)))


# Python's bools are ints as well, so they are excluded.
def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer."""
    return isinstance(value, int | np.integer) and not _is_flag(value)


def _are_devices(value: Any) -> bool:
    if _is_list(value):
        return all(isinstance(name, str) for name in value)
    return _by_name(value) or (isinstance(value, int) and not isinstance(value, bool))


@dataclass(frozen=True, kw_only=True, repr=False)
class ExpertOptions:
    """Options for developers of Penstock and for benchmarks, which ``penstock.compile`` takes as
    ``expert=``. Programs that run models do not need them. Raises as ``compile`` does."""

    given: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that were given, even if they equal their defaults."""

    fixed_threads: bool = option(
        False,
        "Give the kernels of a run that is alone all of its threads; by default it has one thread "
        "where that has proved faster.",
        _is_flag,
    )
    max_streams: int | None = option(
        None, "Use at most N streams, even if they do not pay off; by default as many as pay off."
    )
    memory_planner: MemoryPlanner = option(
        "quick",
        'How offsets in the arena are chosen. "quick": a search for the smallest arena; "best": a '
        'longer one; "wic": largest tensors first; "first_fit": in order of first use; "bump": no '
        "memory is used twice, for debugging.",
    )
    cost_model: CostModel | None = option(
        None,
        "Costs to decide by, instead of those measured on this machine: an object with a method "
        "cost(node, backend, threads), which returns a penstock.tuning.measure.Cost, and perhaps "
        "transfer(source, target, nbytes), which returns seconds. Nothing is measured then.",
        lambda value: hasattr(value, "cost"),
    )
    pool: Workers | None = option(
        None,
        "Threads that run tasks and submitted runs, instead of the pool of the process: a "
        "penstock.host.threads.Workers.",
        lambda value: hasattr(value, "submit"),
    )
    grouping: type[ClusteredGrouping] | None = option(
        None,
        'How steps form tasks for executor="parallel": a penstock.plan.grouping.ClusteredGrouping.',
        lambda value: isinstance(value, type),
    )
    capture: bool = option(
        True,
        "Capture steps of fixed shapes on a device with graphs (CUDA) into graphs, after a few "
        "runs, so that one launch replays them. For plans in one order.",
        _is_flag,
    )
    after_pass: AfterPass | None = option(
        None,
        "Function that is called with each compiler pass that ran (see penstock.passes.pipeline) "
        "and the graph as the pass left it. It must not change the graph.",
        callable,
    )

    def __new__(cls, **options: object) -> Self:
        record = object.__new__(cls)
        # Once __init__ has filled in the defaults, given options can no longer be recognised.
        object.__setattr__(record, "given", frozenset(options))
        return record

    def __post_init__(self) -> None:
        _check_types(self)
        check_choice("memory_planner", self.memory_planner, get_args(MemoryPlanner))
        if self.max_streams is not None:
            check_count("max_streams", self.max_streams)

    def changed(self, **options: object) -> ExpertOptions:
        """Return a copy with some options replaced."""
        own: dict[str, Any] = {name: getattr(self, name) for name in self.given}
        return ExpertOptions(**{**own, **options})

    def __repr__(self) -> str:
        own = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        changed = [f"{name}={value!r}" for name, value, default in own if value is not default]
        return f"ExpertOptions({', '.join(changed)})"


DEFAULT_EXPERT = ExpertOptions()


@dataclass(frozen=True)
class CompileOptions:
    """The options of ``penstock.compile``. Raises ``ValueError`` for a value that an option does
    not allow, and ``TypeError`` for one of a wrong type."""

    given: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that were given, even if they equal their defaults."""

    executor: ExecutorName = option(
        "auto",
        'How plans run. "linear": in a fixed order, as one generated function; "dataflow": step '
        'by step, as inputs become ready; "parallel": on several threads, where a simulated '
        'schedule says that this is no slower; "streams": on streams scheduled at compile time, '
        'where these pay off; "frames": by tokens, as TensorFlow does, without changes of the '
        'graph; "interpret": for debugging, each node of the model by its NumPy kernel, with '
        'every value checked against its declared type; "auto": "frames" where the model needs '
        'it, else "linear", or "parallel" where it clearly wins.',
    )
    backends: Sequence[str | Backend] | None = option(
        None,
        'Backends by name or as objects, the preferred first; by default "native" (compiled '
        'kernels), if available, and "numpy". If several can run a node, costs decide.',
        _is_list,
    )
    place: Mapping[str, str | Sequence[str]] | None = option(
        None,
        'Backends by name for operations ("Conv") or single nodes ("node:add_3"); they override '
        "costs. AllReduce and Broadcast may have a list of backends, for input and output i the "
        'i-th. With cluster=, workers by name ("/job:worker/task:1"), too.',
        partial(_by_name, allowed=_is_place),
    )
    threads: int | None = option(
        None, "The most cores that one run uses; by default all cores of the process."
    )
    shapes: InputShapes | Sequence[InputShapes] | None = option(
        None,
        "Dims of inputs for which to compile a plan now, instead of in the first run: shapes by "
        'the names of inputs, or sizes by the names of dims ({"batch": 8}); or a list of such '
        "mappings, with a plan for each.",
        _are_shapes,
    )
    limits: Limits | None = option(
        None, "Bounds on the resources of the model.", lambda value: isinstance(value, Limits)
    )
    memory: int | str | None = option(
        None,
        'The most bytes that the session holds, or a text such as "512MB" or "2GiB": its '
        "weights, plans, the arenas of its runs, and their results until they are returned. Runs "
        "wait until others release memory; a plan that needs more is refused with LimitExceeded, "
        "which says how much would be enough. Memory of Python and of libraries is not counted.",
        lambda value: isinstance(value, str) or is_integer(value),
    )
    map_weights: bool = option(
        False,
        "Map files of weights beside the model (ONNX's external data, the shards of a SavedModel) "
        "into memory instead of reading them: pages are read when first used and shared by all "
        "processes that map them. These files must not be changed in place while the session "
        "lives: one that is cut short ends the process (SIGBUS), one that is written changes "
        "answers. Replacing a file by renaming another is safe.",
        _is_flag,
    )
    signature: str | None = option(
        None,
        "The signature of a SavedModel or a TFLite file to run, with its names of inputs and "
        'outputs; by default "serving_default", or a TFLite file\'s first subgraph.',
        lambda value: isinstance(value, str),
    )
    cache: bool | str | Path | None = option(
        None,
        "Keep the compiled session of a model that is given as a path or as bytes, and open it "
        "the next time. A folder, or True for PENSTOCK_CACHE or else the user's cache folder. "
        "Models are identified by the bytes of their files. The first run writes packed "
        "constants, about as many bytes as the weights; a folder keeps 1 GiB. By default, "
        "sessions of up to 32 MiB of models in files are kept in the user's folder when the "
        "session or the process ends, and found as long as the file is not changed; False or "
        "PENSTOCK_CACHE=off keeps nothing.",
        lambda value: _is_flag(value) or isinstance(value, str | os.PathLike),
    )
    autotune: bool = option(
        False, "Measure nodes on all backends that can run them when a plan is compiled.", _is_flag
    )
    precision: Precision = option(
        "float32",
        '"float32" computes float16 and bfloat16 in float32, and rounds the outputs of the '
        'model; "strict" rounds after each operation to the type in the model; "bf16" is like '
        '"float32", but rounds the operands of large products and convolutions to bfloat16 where '
        'the processor supports it: faster, with two to three digits; "tf32" is like "float32", '
        "but lets the torch backend on a GPU round them to TensorFloat-32.",
    )
    reproducible: bool = option(
        False,
        "Compute the same bits for a sample, whatever its batch, its place in the batch, the "
        "number of threads, the executor, and the processor, if that is of x86-64 with AVX2 and "
        "FMA. Nodes that only NumPy computes, by the processor, are refused.",
        _is_flag,
    )
    dead_rows: DeadRows = option(
        "exact",
        "What outputs contain in rows that are padding, which a mask hides from attention. "
        '"exact": what the model computes; rows that no output depends on are not computed. '
        '"any": undefined values, so that these rows are not computed either, and are 0 where '
        "that saved work: for encoders whose outputs have all rows, if the caller applies the "
        "mask.",
    )
    compile_in_run: bool = option(
        True,
        "Whether a run with new shapes compiles a plan. If False, it raises InvalidInput, which "
        "names the shapes to compile ahead (shapes=); a model whose dims are all fixed is "
        "compiled at once. Plans of a saved session are used, if they are for this machine.",
        _is_flag,
    )
    devices: int | Sequence[str] | Mapping[str, str | Backend] | None = option(
        None,
        "Virtual devices of this process, as a number or names: the frames executor runs each "
        "node on the device that it names. A mapping gives each device a backend, which runs the "
        "nodes that it supports. By default all nodes run on one device. A list of CUDA devices, "
        '["cuda:0", "cuda:1"], makes a torch backend for each, called "torch", "torch:1" and so '
        "on in place=, with any executor. With cluster= they are devices of each worker, or of "
        "the worker in their names.",
        _are_devices,
    )
    cluster: WorkerPool | None = option(
        None,
        "A penstock.Cluster whose workers run parts of graphs. A node runs on the worker that it "
        'names ("/job:worker/task:1"), or that place= names for it; costs decide where the '
        "others run.",
        lambda value: hasattr(value, "devices"),
    )
    variables: SharedVariables | None = option(
        None,
        "The variables of another session of the model (Session.variables), to read and assign "
        "instead of variables of its own.",
        lambda value: hasattr(value, "restore"),
    )
    priority: int = option(
        0,
        "Runs of higher priority are served first: running ones of lower priority pause for "
        "them, and of waiting runs one in eight is of a lower priority.",
        is_integer,
    )
    max_pending: int = option(
        1000,
        "The most submitted runs that have not ended: with more, submit waits for one of them to "
        "end.",
    )
    timeout: float | None = option(
        None,
        "Seconds from the call after which reading and compiling end with DeadlineExceeded; runs "
        "have a timeout of their own.",
    )
    cancel: CancelToken | None = option(
        None, "A token whose cancel() ends reading and compiling with Cancelled."
    )
    progress: bool | Progress = option(
        False,
        "Report the progress of compiling and measuring. True writes a line to stderr; a "
        "function is called with the name of the next step, the number of finished steps, and "
        "the number of all.",
        lambda value: _is_flag(value) or callable(value),
    )
    expert: ExpertOptions = option(
        DEFAULT_EXPERT,
        "Options for developers and benchmarks: a penstock.ExpertOptions.",
        lambda value: isinstance(value, ExpertOptions),
    )

    def __post_init__(self) -> None:
        _check_types(self)
        check_choice("precision", self.precision, PRECISIONS, _PRECISIONS_ELSEWHERE)
        check_choice("executor", self.executor, EXECUTORS)
        check_choice("dead_rows", self.dead_rows, get_args(DeadRows))
        if self.threads is not None:
            check_count("threads", self.threads)
        check_count("max_pending", self.max_pending, 1_000_000)
        if self.memory is not None:
            self._check_memory()
        frames = self.executor in ("auto", "frames")
        if self.devices is not None and not frames and not self.cuda_devices:
            raise OptionError(f'devices= are for executor="frames", not {self.executor!r}')
        if self.reproducible:
            self._check_reproducible()
        if self.cluster is not None and not self.compile_in_run:
            raise OptionError("compile_in_run=False goes without cluster=, whose workers compile")
        if self.cluster is not None and self.executor != "auto":
            raise OptionError('cluster= goes with executor="auto"')
        if self.cluster is not None and self.cuda_devices:
            raise OptionError(
                f"devices={[*self.cuda_devices]} goes without cluster=, whose workers have devices "
                'of their own: ["cpu:0", "cpu:1"], say, or {"cpu:0": "torch"} with backends'
            )
        if self.cluster is not None and self.variables is not None:
            raise OptionError("variables= goes without cluster=, whose workers have the variables")

    def _check_reproducible(self) -> None:
        if self.precision not in ("float32", "strict"):
            raise OptionError(f"reproducible=True goes without precision={self.precision!r}")
        if self.executor == "interpret":  # which computes by NumPy
            raise OptionError("reproducible=True goes without executor='interpret'")
        for name in ("autotune", "cluster", "devices"):
            if getattr(self, name):
                raise OptionError(f"reproducible=True goes without {name}=")
        if self.expert.cost_model is not None:
            raise OptionError("reproducible=True goes without cost_model=, and measures no costs")
        if not {"native", "numpy"}.issuperset(self.backends or ()):
            raise OptionError("reproducible=True goes with the backends 'native' and 'numpy' alone")

    def _check_memory(self) -> None:
        try:
            if self.memory_bytes is not None:
                check_count("memory", self.memory_bytes, maxsize)
        except ValueError as error:
            raise OptionError(f"memory={error}") from None
        if self.executor in ("frames", "interpret") or self.devices is not None:
            raise OptionError("memory= is for plans, which frames and executor='interpret' lack")
        if self.cluster is not None:
            raise OptionError("memory= goes without cluster=, whose workers have their own memory")

    @property
    def memory_bytes(self) -> int | None:
        """The bytes that the session may hold, or None without a bound."""
        return parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory

    def check_use(self, given: Collection[str]) -> None:
        """Raise ``OptionError`` for an option that would have no effect. Call this once packages
        and the environment have set their options; ``given`` are those of the caller."""
        if self.expert.max_streams is not None and self.executor != "streams":
            raise OptionError(f'max_streams= is for executor="streams", not {self.executor!r}')
        if self.expert.grouping is not None and self.executor not in ("auto", "parallel"):
            raise OptionError(
                f'grouping= is for executor="parallel" or "auto", not {self.executor!r}'
            )
        # A package may name a planner, and the environment an executor other than the package's.
        if "memory_planner" in given and self.executor in ("dataflow", "interpret"):
            raise OptionError(
                f"memory_planner= lays out an arena, and executor={self.executor!r} has none"
            )

    @property
    def cuda_devices(self) -> tuple[str, ...]:
        """The CUDA devices that ``devices`` names, or () if it names other devices."""
        names = self.devices if _is_list(self.devices) else ()
        assert isinstance(names, Sequence)
        cuda = all(name.startswith("cuda:") and name[5:].isdecimal() for name in names)
        return tuple(names) if cuda else ()

    def get(self, name: str) -> Any:
        """Return the value of an option, which may be one of ``expert``."""
        return getattr(self.expert if name in EXPERT else self, name)

    def filled(self, values: NamedValues) -> CompileOptions:
        """Return these options with ``values``, also for ``expert``, for those that were not given.
        None counts as not given."""
        # The first source that sets an option wins: the caller, the model's file, the environment.
        unset = {}
        for name, value in values.items():
            own = self.get(name)
            if own is None or (own == DEFAULTS.get(name) and name not in self.given):
                unset[name] = value
        if not unset:
            return self
        changes = {name: value for name, value in unset.items() if name not in EXPERT}
        if expert := {name: value for name, value in unset.items() if name in EXPERT}:
            changes["expert"] = self.expert.changed(**expert)
        return with_given(replace(self, **changes), self.given | unset.keys())


EXPERT = frozenset([f.name for f in fields(ExpertOptions)])
"""names of the options in ``CompileOptions.expert``"""
DEFAULTS = CompileOptions()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run: of ``Session.run``, ``submit``, ``run_async`` and ``arun``, and of
    ``Stream.run``."""

    feeds: Feeds | None = option(
        None,
        "Values by name: arrays (anything with __array__ or __dlpack__), lists and numbers of the "
        "input's dtype and shape; tensors on the device of a backend are read there. "
        "Any value of the model may be fed. A DataFrame feeds its columns to the inputs of their "
        "names; a column may be fed for [N, 1].",
    )
    fetches: Sequence[str] | None = option(
        None, "Names of the values to return, by default the model's outputs."
    )
    targets: Sequence[str] | None = option(
        None, "Names of values or nodes to compute without returning them."
    )
    _: KW_ONLY
    timeout: float | None = option(
        None,
        "Seconds from the call after which the run ends with DeadlineExceeded, including time to "
        "compile.",
    )
    cancel: CancelToken | None = option(None, "A token whose cancel() ends the run with Cancelled.")
    priority: int | None = option(
        None, "Runs of higher priority are served first; by default the priority of the session."
    )
    trace: Observer | None = option(None, "A penstock.Trace that records the run.")
    observers: Sequence[Observer] = option((), "Observers of each step of the run.")
    out: Mapping[str, np.ndarray] | None = option(
        None,
        "Arrays, by the names of fetched values, to write these into and return, instead of new "
        "arrays. Each must have the dtype and the dims of its value. The run allocates nothing "
        "for an array that is contiguous, aligned to 16 bytes and shares no memory with a feed. "
        "The contents are undefined if the run fails.",
    )
    returns: Returns = option(
        "numpy",
        'The type of outputs: "numpy" arrays, or "torch" tensors on the device of the torch '
        "backend. Tensors that are computed there are not copied; clone() them to change them in "
        "place outside of torch.inference_mode.",
    )

    def __post_init__(self) -> None:
        if self.out is not None and not _by_name(self.out, lambda x: isinstance(x, np.ndarray)):
            raise wrong_type("out", self.out, "a mapping of names to arrays")
        check_choice("returns", self.returns, RETURNS)
        if self.priority is not None and not is_integer(self.priority):
            raise wrong_type("priority", self.priority, "int")
        if self.out is not None and self.returns != "numpy":
            raise OptionError("out= has arrays to write into, and returns= asks for new tensors")
        if not isinstance(self.observers, Iterable):
            raise wrong_type("observers", self.observers, "Sequence[Observer]")
        for observer in self.all_observers:
            if not isinstance(observer, Observer):
                raise TypeError(
                    f"a {type(observer).__name__} does not observe: trace= takes a penstock.Trace, "
                    "observers= a list of these and of other penstock.Observers"
                )

    @property
    def all_observers(self) -> tuple[Observer, ...]:
        """The trace, if any, followed by the other observers."""
        others = tuple(self.observers)
        return others if self.trace is None else (self.trace, *others)


P = ParamSpec("P")
Result = TypeVar("Result")


def make(record: Callable[P, Result], caller: str, *arguments: Any, **options: Any) -> Result:
    """Return the record of these options. The ``TypeError`` for an unknown name suggests one."""
    names = option_names(record)
    for name, value in options.items():
        if name not in names:
            raise TypeError(f"{caller}() has no option {name!r}; {_hint(name, value, names)}")
    new = record(*arguments, **options)
    expert = new.expert.given if isinstance(new, CompileOptions) else ()
    return with_given(new, {*options, *expert})


def _hint(name: str, value: object, names: Sequence[str]) -> str:
    """Return what an option may mean whose name is not among ``names``."""
    if name in EXPERT and "expert" in names:
        text = repr(value) if isinstance(value, bool | int | str) else "..."
        return f"it is expert=penstock.ExpertOptions({name}={text})"
    if name in _ELSEWHERE and "expert" in names:
        return _ELSEWHERE[name]
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"


def with_given(record: Result, names: Collection[str]) -> Result:
    """Return ``record`` with the names of the options that were given."""
    if isinstance(record, CompileOptions):
        object.__setattr__(record, "given", frozenset(names))
    return record
