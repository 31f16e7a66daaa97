"""The options of compiling and of running, each spelled once.

``takes`` gives a function that passes its arguments on to such a record the record's signature,
for type checkers and for ``help``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cache
from inspect import Parameter, Signature, cleandoc
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast, overload

from penstock.algorithms.arena_planner import MEMORY_PLANNERS
from penstock.observers.base import Observer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.base import Backend
    from penstock.executors.control import CancelToken
    from penstock.host.threads import Workers
    from penstock.limits import Limits
    from penstock.passes.context import AfterPass
    from penstock.plan.grouping import ClusteredGrouping
    from penstock.tuning.measure import CostModel

EXECUTORS = ("auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret")
PRECISIONS = ("float32", "bf16", "strict")


def option(default: Any, help: str) -> Any:
    """A field of a record of options; ``help`` is its text in documentation and on the command
    line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class CompileOptions:
    """What ``penstock.compile`` takes beside the model. Raises ``ValueError`` for a value that no
    option has."""

    given: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that were given, of these those that may be at their defaults."""

    executor: str = option(
        "auto",
        'How plans run. "linear": in a fixed order, as one generated function; "dataflow": step by '
        'step, as inputs become ready; "parallel": on several threads, where a simulated schedule '
        'says that this is no slower; "streams": on streams scheduled at compile time, where these '
        'pay off; "frames": by tokens, as TensorFlow does, every node as it is; "interpret": for '
        "debugging, every node as it is on its NumPy kernel, every value checked against its "
        'declared type; "auto": "frames" where the model needs it, else "linear", or "parallel" '
        "where it clearly wins.",
    )
    backends: Sequence[str | Backend] | None = option(
        None,
        "Backends by name or as objects, the preferred first; by default oneDNN, where there is "
        "one, then NumPy. Where several can run a node, costs decide.",
    )
    place: Mapping[str, str] | None = option(
        None,
        'Backends by name for operations ("Conv") or single nodes ("node:add_3"); they override '
        "costs.",
    )
    threads: int | None = option(
        None, "Cores that one run may keep busy; by default all that the process has."
    )
    shapes: Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]]] | None = option(
        None,
        "Dims of inputs for which to compile a plan now, instead of at the first run; or a list of "
        "such mappings, for a plan each.",
    )
    limits: Limits | None = option(None, "Bounds on what the model may ask for.")
    map_weights: bool = option(
        False,
        "Map files of weights beside the model (ONNX's external data, the shards of a SavedModel) "
        "into memory instead of reading them: pages are read when first used and shared by all "
        "processes that map them. These files must not be changed in place while the session "
        "lives: one that is cut short ends the process (SIGBUS), one that is written changes "
        "answers. Replacing a file by renaming another is safe.",
    )
    signature: str | None = option(
        None,
        "The signature of a SavedModel or a TFLite file to run, with its names of inputs and "
        'outputs; by default "serving_default", or a TFLite file\'s first subgraph.',
    )
    cache: bool | str | Path = option(
        False,
        "Keep the compiled session of a model that is given as a path or as bytes, and open it "
        "where it was kept before: a folder, or True for the user's, or that of PENSTOCK_CACHE. "
        "Models are told apart by the bytes of their files. The first run writes about twice the "
        "bytes of the weights; a folder keeps 4 GiB. Models with variables are not kept.",
    )
    autotune: bool = option(
        False, "Measure nodes on all backends that can run them when a plan is compiled."
    )
    precision: str = option(
        "float32",
        '"float32" computes float16 and bfloat16 in float32, and rounds what leaves the model; '
        '"strict" rounds after each operation to the type that the model says; "bf16" is like '
        '"float32", but lets oneDNN round the operands of large products and convolutions to '
        "bfloat16 where the processor supports it: faster, with two to three digits.",
    )
    max_streams: int | None = option(
        None, "Use at most N streams, even if they do not pay off; by default as many as pay off."
    )
    memory_planner: str = option(
        "quick",
        'How offsets in the arena are chosen. "quick": a search for the smallest arena; "best": a '
        'longer one; "wic": largest tensors first; "first_fit": in order of first use; "bump": no '
        "memory is used twice, for debugging.",
    )
    devices: int | Sequence[str] | Mapping[str, str | Backend] | None = option(
        None,
        "Virtual devices of this process, their number or their names: the frames executor runs "
        "each node on the device that it names. A mapping gives each device a backend, where its "
        "nodes run as far as that supports them. By default all nodes run on one device.",
    )
    cost_model: CostModel | None = option(
        None,
        "Costs to decide by, instead of those measured on this machine: a "
        "penstock.tuning.measure.CostModel. Nothing is measured then.",
    )
    pool: Workers | None = option(
        None,
        "Threads that run tasks and submitted runs, instead of the pool of the process: a "
        "penstock.host.threads.Workers.",
    )
    max_pending: int = option(
        1000,
        "Runs that may have been submitted and not have ended: submit waits for one of them to end "
        "before it takes another.",
    )
    grouping: type[ClusteredGrouping] | None = option(
        None,
        'How steps form tasks for executor="parallel": a penstock.plan.grouping.ClusteredGrouping.',
    )
    timeout: float | None = option(
        None,
        "Seconds after which reading and compiling end with DeadlineExceeded, counted from the "
        "call; runs have a timeout of their own.",
    )
    cancel: CancelToken | None = option(
        None, "A token whose cancel() ends reading and compiling with Cancelled."
    )
    after_pass: AfterPass | None = option(
        None,
        "Function that is called with each compiler pass that ran (see penstock.passes.pipeline) "
        "and the graph as the pass left it. It must not change the graph.",
    )

    def __post_init__(self) -> None:
        choices = {
            "precision": PRECISIONS,
            "executor": EXECUTORS,
            "memory_planner": MEMORY_PLANNERS,
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
        for name, most in {"threads": None, "max_streams": None, "max_pending": 1_000_000}.items():
            value = getattr(self, name)
            if value is None and most is None:
                continue
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole or value < 1 or (most is not None and value > most):
                range_ = "of at least 1" if most is None else f"from 1 to {most:,}"
                raise ValueError(f"{name}={value!r}: a whole number {range_} is needed")
        if self.devices is not None and self.executor not in ("auto", "frames"):
            raise ValueError(f'devices= are for executor="frames", not {self.executor!r}')

    def filled(self, values: Mapping[str, Any]) -> CompileOptions:
        """These options with ``values`` for those that were not given. None is never given."""
        unset = {}
        for name, value in values.items():
            own = getattr(self, name)
            if own is None or (own == getattr(CompileOptions, name) and name not in self.given):
                unset[name] = value
        return _with_given(replace(self, **unset), self.given | unset.keys())


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run takes: ``Session.run``, ``submit``, ``run_async`` and ``arun``, and
    ``Stream.run``."""

    feeds: Mapping[str, Any] | None = option(
        None,
        "Values by name: arrays (anything with __array__ or __dlpack__), lists and numbers of the "
        "input's dtype and shape. Any value of the model may be fed.",
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
        "Seconds after which the run ends with DeadlineExceeded, counted from the call, also "
        "while it is compiled.",
    )
    cancel: CancelToken | None = option(None, "A token whose cancel() ends the run with Cancelled.")
    trace: Observer | None = option(None, "A penstock.Trace that records the run.")
    observers: Sequence[Observer] = option((), "Observers that are told of each step of the run.")

    def __post_init__(self) -> None:
        for observer in self.all_observers:
            if not isinstance(observer, Observer):
                raise TypeError(
                    f"a {type(observer).__name__} does not observe: trace= takes a penstock.Trace, "
                    "observers= a list of these and of other penstock.Observers"
                )

    @property
    def all_observers(self) -> tuple[Observer, ...]:
        """The trace, if any, and the other observers."""
        others = tuple(self.observers)
        return others if self.trace is None else (self.trace, *others)


P = ParamSpec("P")
First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")


@overload
def takes(
    record: Callable[P, Any],
) -> Callable[[Callable[..., Result]], Callable[Concatenate[First, P], Result]]: ...


@overload
def takes(
    record: Callable[P, Any], after: tuple[type[Second]]
) -> Callable[[Callable[..., Result]], Callable[Concatenate[First, Second, P], Result]]: ...


def takes(record: Callable[..., Any], after: tuple[type, ...] = ()) -> Callable[..., Any]:
    """Declare that a function takes what ``record`` takes, behind its first parameter and as many
    as ``after`` has types.

    The function itself is returned, with the signature and the documentation of the options.
    """

    def declare(function: Any) -> Any:
        leading = function.__code__.co_varnames[: 1 + len(after)]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in leading]
        function.__signature__ = Signature([*parameters, *_parameters(record)])
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{document(record)}"
        return function

    return declare


@cache
def _parameters(record: Any) -> list[Parameter]:
    """The parameters of a record."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return [
        Parameter(f.name, kinds[f.kw_only is True], default=f.default, annotation=f.type)
        for f in fields(record)
    ]


@cache
def document(record: Any) -> str:
    """The options of ``record`` and what they mean, a paragraph each."""
    return "\n\n".join(f"``{f.name}``: {f.metadata['help']}" for f in fields(record))


def help_of(record: Any, name: str) -> str:
    """The text of one option."""
    return next(str(f.metadata["help"]) for f in fields(record) if f.name == name)


def make(record: Callable[P, Result], caller: str, *arguments: Any, **options: Any) -> Result:
    """The record of these options; ``TypeError`` suggests a name for one that there is not."""
    for name in options:
        names = [f.name for f in fields(cast(Any, record))]
        if name not in names:
            from difflib import get_close_matches

            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            raise TypeError(f"{caller}() has no option {name!r}; {hint}")
    return _with_given(record(*arguments, **options), options.keys())


def _with_given(record: Result, names: Collection[str]) -> Result:
    """``record``, which now knows which of its options were given."""
    if isinstance(record, CompileOptions):
        object.__setattr__(record, "given", frozenset(names))
    return record
