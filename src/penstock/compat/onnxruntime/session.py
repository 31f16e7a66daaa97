"""``InferenceSession``: ONNX Runtime's session on top of one of Penstock's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.compat.onnxruntime.binding import IOBinding
from penstock.compat.onnxruntime.environment import (
    HOST_MEMORY,
    OrtEpDevice,
    OrtMemoryInfo,
    get_ep_devices,
)
from penstock.compat.onnxruntime.errors import (
    CodedError,
    Fail,
    InvalidArgument,
    InvalidProtobuf,
    NoSuchFile,
    translated,
)
from penstock.compat.onnxruntime.options import ExecutionMode, RunOptions, SessionOptions
from penstock.compat.onnxruntime.unavailable import OF_SESSIONS, lacking
from penstock.compat.onnxruntime.values import (
    ModelMetadata,
    NodeArg,
    OrtDevice,
    OrtValue,
    node_arg,
    plain_value,
)
from penstock.compiler.options import ExecutorName
from penstock.core.errors import InvalidInput, InvalidModel, warn
from penstock.core.records import replace
from penstock.core.types import JsonObject, NamedValues, RunValue, TensorType, type_of
from penstock.frontends.load import load
from penstock.frontends.onnx.file import has_external_data
from penstock.ir.graph import Model, clone
from penstock.observers.trace import Trace
from penstock.session.facts import Port
from penstock.session.session import compile

CPU = "CPUExecutionProvider"
_NO_VERSION = str(2**63 - 1)  # what ONNX Runtime says of a model without a version


def get_available_providers() -> list[str]:
    """The providers that there are: the host's processor alone."""
    return [CPU]


get_all_providers = get_available_providers


def get_device() -> str:
    """The kind of device that models run on."""
    return "CPU"


@lacking(OF_SESSIONS)
class InferenceSession:
    """A model, compiled. Warns of options that have no effect.

    Args:
        path_or_bytes: A model's file or its bytes.
        sess_options: Options; by default those of ``SessionOptions()``.
        providers: Names, or pairs of a name and options; others than the processor's are warned of.
        provider_options: Without effect.
        kwargs: Without effect: ONNX Runtime's own, as ``disabled_optimizers``.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[str, object]]] | None = None,
        provider_options: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> None:
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        self._options = options = sess_options or SessionOptions()
        _check_providers(providers or ())
        self._model_path = None if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
        given = any(provider_options or ()) or any(_has_options(name) for name in providers or ())
        _warn_of([*options._without_effect(), *["provider_options"] * given, *kwargs])
        model = _loaded(path_or_bytes)
        _set_free_dims(model, options.free_dims)
        _set_initializers(model, options.initializers)
        parallel = options.execution_mode == ExecutionMode.ORT_PARALLEL
        threads = options.intra_op_num_threads
        # Penstock has one pool of threads, where ONNX Runtime has one within and one between nodes.
        threads = max(threads, options.inter_op_num_threads) if threads and parallel else threads
        executor: ExecutorName = "parallel" if parallel else "auto"
        self._compiled = partial(compile, threads=threads or None, executor=executor)
        with translated(otherwise=Fail):
            self._session = self._compiled(model)
        if options.optimized_model_filepath:
            _write_model(path_or_bytes, options.optimized_model_filepath)
        self._trace = Trace() if options.enable_profiling else None
        self._began_ns = time.perf_counter_ns()
        self._outputs = [port.name for port in self._session.outputs]
        self._declared = self._session.inputs
        self._inputs = [port.name for port in self._declared]

    # Properties of the model.

    def get_inputs(self) -> list[NodeArg]:
        """Names, dims and types of the inputs."""
        return [node_arg(port) for port in self._declared]

    def get_outputs(self) -> list[NodeArg]:
        """Names, dims and types of the outputs; dims that are open until a run are as the file
        declares them."""
        declared = self._session.model.output_dims
        return [node_arg(port, declared.get(port.name)) for port in self._session.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Names, dims and types of the initializers that are inputs too, which need not be fed."""
        return [node_arg(Port(*item)) for item in self._session.model.overridable.items()]

    def get_modelmeta(self) -> ModelMetadata:
        """The metadata of the model's file."""
        model = self._session.model
        about = model.about.get
        return ModelMetadata(
            dict(model.metadata),
            about("description", ""),
            about("domain", ""),
            about("graph description", ""),
            model.entry,
            about("producer", ""),
            int(about("model version", _NO_VERSION)),
        )

    def get_session_options(self) -> SessionOptions:
        """The options of the session."""
        return self._options

    def get_providers(self) -> list[str]:
        """The providers in use."""
        return [CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each provider: none."""
        return {CPU: {}}

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, Mapping[str, object]]] | None = None,
        provider_options: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        """Warn of providers that there are not.

        Args:
            providers: Names, or pairs of a name and options; others than the processor's are warned
                of.
            provider_options: Without effect.
        """
        _check_providers(providers or ())

    def disable_fallback(self) -> None:
        """Nothing is ever tried on another provider."""

    enable_fallback = disable_fallback

    # Runs.

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: NamedValues,
        run_options: RunOptions | None = None,
    ) -> list[RunValue]:
        """The outputs of these names, in their order.

        Args:
            output_names: By default all outputs of the model.
            input_feed: Arrays, or values, by name.
            run_options: Ends the run where ``terminate`` is set.
        """
        names = list(output_names or self._outputs)
        outputs = self._run(names, input_feed, run_options)
        return [outputs[name] for name in names]

    def _run(
        self,
        names: Sequence[str],
        feeds: NamedValues,
        options: RunOptions | None,
        out: dict[str, RunValue] | None = None,
    ) -> dict[str, RunValue]:
        feeds = self._checked(names, feeds)
        # A run of all outputs need not look for the part of the model that they need.
        fetches = None if names == self._outputs else names
        more: dict[str, Any] = {"out": out} if out else {}
        with translated():
            try:
                return self._session.run(feeds, fetches, **self._observed(options), **more)
            except InvalidInput:
                if not self._separates_dims(feeds):
                    raise
                return self._session.run(feeds, fetches, **self._observed(options), **more)

    def _separates_dims(self, feeds: Mapping[str, RunValue]) -> bool:
        """Whether the model had to be compiled again because named dims have several sizes, which
        ONNX Runtime lets run."""
        sizes: dict[str, set[int]] = {}
        for port in self._session.inputs:
            declared = port.type.shape if isinstance(port.type, TensorType) else None
            for dim, size in zip(declared or (), np.shape(feeds[port.name]), strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, set()).add(size)
        several = {dim: sorted(each) for dim, each in sizes.items() if len(each) > 1}
        model = self._session.model
        if not several or model.artifact is not None:
            return False
        warn(f"dims of inputs that have one name in the model have several sizes: {several}")
        graph = clone(model.graph)
        for value in graph.inputs:
            if isinstance(value.type, TensorType) and value.type.shape is not None:
                dims = [None if dim in several else dim for dim in value.type.shape]
                value.type = TensorType(value.type.dtype, tuple(dims))
        self._session = self._compiled(replace(model, graphs={**model.graphs, model.entry: graph}))
        return True

    def _observed(self, options: RunOptions | None) -> dict[str, Any]:
        """The options of a run: what ends it, and the trace that records it."""
        own: dict[str, Any] = {} if options is None else {"cancel": options.token}
        if options is not None and options._entries:
            _warn_of([*options._entries])
        return own if self._trace is None else {**own, "trace": self._trace}

    def _checked(self, names: Sequence[str], feeds: NamedValues) -> dict[str, RunValue]:
        missing = [name for name in self._inputs if name not in feeds]
        if missing:
            raise ValueError(
                f"Required inputs ({missing}) are missing from input feed ({list(feeds)})."
            )
        for name in names:
            if name not in self._outputs:
                raise InvalidArgument(f"Invalid output name:{name}")
        for name in feeds:
            if name not in self._inputs and name not in self._session.model.overridable:
                raise InvalidArgument(f"Invalid input name: {name}")
        return {name: plain_value(value) for name, value in feeds.items()}

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: NamedValues,
        callback: Callable[[list[Any], Any, str], object],
        user_data: object,
        run_options: RunOptions | None = None,
    ) -> None:
        """Return at once, and call a function when the run has ended.

        Args:
            output_names: By default all outputs of the model.
            input_feed: Arrays, or values, by name.
            callback: ``callback(outputs, user_data, error)``, called when the run has ended, with
                no outputs and the text of the error if it failed.
            user_data: What the callback gets.
            run_options: Ends the run where ``terminate`` is set.
        """
        names = list(output_names or self._outputs)
        feeds = self._checked(names, input_feed)
        self._separates_dims(feeds)

        def done(outputs: dict[str, RunValue] | None, error: BaseException | None) -> None:
            if outputs is None:
                callback([], user_data, str(error))
            else:
                callback([outputs[name] for name in names], user_data, "")

        self._session.run_async(done, feeds, names, **self._observed(run_options))

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """``run`` with values instead of arrays.

        Args:
            output_names: By default all outputs of the model.
            input_dict_ort_values: Values by name.
            run_options: Ends the run where ``terminate`` is set.
        """
        outputs = self.run(output_names, input_dict_ort_values, run_options)
        return [OrtValue(output) for output in outputs]

    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: Sequence[OrtValue],
        fetch_names: Sequence[str],
        fetches: list[OrtValue],
        fetch_devices: Sequence[OrtDevice],
    ) -> None:
        """``run`` with lists of values.

        Args:
            run_options: Ends the run where ``terminate`` is set.
            feed_names: Inputs.
            feeds: Their values.
            fetch_names: Outputs.
            fetches: A list that gets their values.
            fetch_devices: Not looked at: values are in the host's memory.
        """
        values = dict(zip(feed_names, feeds, strict=True))
        fetches[:] = self.run_with_ort_values(fetch_names, values, run_options)

    def get_input_epdevices(self) -> list[OrtEpDevice]:
        """The device of each input."""
        return get_ep_devices() * len(self._inputs)

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """The memory of each input."""
        return [HOST_MEMORY] * len(self._inputs)

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """The memory of each output."""
        return [HOST_MEMORY] * len(self._outputs)

    def io_binding(self) -> IOBinding:
        """A new binding of inputs and outputs."""
        return IOBinding(self)

    def run_with_iobinding(
        self, iobinding: IOBinding, run_options: RunOptions | None = None
    ) -> None:
        """Run on what is bound; the outputs are in the binding. Raises ``RuntimeError`` for
        whatever goes wrong.

        Args:
            iobinding: The binding.
            run_options: Ends the run where ``terminate`` is set.
        """
        feeds, names, given = iobinding.arguments()
        try:
            iobinding.results = self._run(names or self._outputs, feeds, run_options, given)
        except (CodedError, ValueError) as error:
            raise RuntimeError(f"Error in execution: {error}") from error

    # Profiles.

    def end_profiling(self) -> str:
        """Write the trace of all runs since the beginning, for Perfetto: a list of events, in which
        those of nodes have their operation as ONNX Runtime's have it (``args["op_name"]``). Returns
        the path, "" if ``enable_profiling`` was not set."""
        if self._trace is None:
            return ""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        path = f"{self._options.profile_file_prefix}_{stamp}.json"
        events = [_profile_event(event) for event in self._trace.to_dict()["traceEvents"]]
        Path(path).write_text(json.dumps(events, allow_nan=False) + "\n", encoding="ascii")
        self._trace = None
        return path

    def get_profiling_start_time_ns(self) -> int:
        """The time at which the session was made, by the clock of the trace."""
        return self._began_ns


def _profile_event(event: JsonObject) -> JsonObject:
    """An event of a trace, with what programs look for in ONNX Runtime's."""
    if event["ph"] != "X":
        return {"cat": "Session", **event}
    arguments = event.get("args", {})
    if "operation" not in arguments:
        return {**event, "cat": "Session"}
    more = {"op_name": arguments["operation"], "provider": CPU}
    return {**event, "cat": "Node", "args": {**arguments, **more}}


def _has_options(provider: str | tuple[str, Mapping[str, object]]) -> bool:
    """Whether a provider that there is comes with options."""
    return not isinstance(provider, str) and provider[0] == CPU and bool(provider[1])


def _warn_of(ignored: Sequence[str]) -> None:
    """Warn of options that change nothing."""
    if ignored:
        warn(f"options without effect on Penstock: {', '.join(ignored)}")


def _write_model(source: str | bytes | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the model as it was: Penstock's optimized graph has operations that ONNX lacks."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    apart = not isinstance(source, bytes) and Path(source).parent != Path(target).parent
    if apart and has_external_data(data):
        warn(
            f"optimized_model_filepath: {os.fspath(target)} was not written, since the model has "
            "external data beside it"
        )
        return
    Path(target).write_bytes(data)
    warn(
        f"optimized_model_filepath: {os.fspath(target)} is the model as it was; what Penstock "
        "makes of it, penstock.compile(path).save(...) keeps"
    )


def _check_providers(providers: Sequence[str | tuple[str, Mapping[str, object]]]) -> None:
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name != CPU:
            warn(
                f"Specified provider '{name}' is not in available provider names. "
                f"Available providers: '{CPU}'"
            )


def _loaded(source: str | bytes | os.PathLike[str]) -> Model:
    """The model of a file or of bytes, with ONNX Runtime's errors."""
    if source == b"":
        raise InvalidArgument("No graph was found in the protobuf.")
    if not isinstance(source, bytes):
        source = Path(source)
        if not source.exists():
            raise NoSuchFile(f"Load model from {source} failed. File doesn't exist")
    try:
        with translated(otherwise=Fail):
            return load(source)
    except Exception as error:
        if isinstance(error.__cause__, InvalidModel) and "protobuf" in str(error):
            raise InvalidProtobuf(error.__cause__) from error.__cause__
        raise


def _set_initializers(model: Model, given: Mapping[str, OrtValue]) -> None:
    """Give constants of the main graph other contents of the same type."""
    constants = {
        value.name: value
        for node in (model.graph.nodes if given else ())
        for value in node.inputs
        if value is not None and value.const is not None
    }
    for name, new in given.items():
        value, array = constants.get(name), np.asarray(plain_value(new))
        if value is None or value.const is None:
            raise InvalidArgument(f"the model has no initializer {name!r}")
        was = value.const
        if (array.dtype, array.shape) != (was.dtype, was.shape):
            raise InvalidArgument(
                f"initializer {name!r} is {type_of(was)} in the model, not {type_of(array)}"
            )
        value.set_constant(array)


def _set_free_dims(model: Model, dims: Mapping[str, int]) -> None:
    """Give dims of inputs sizes, by the names of the dims."""
    if not dims:
        return
    for name, shape in model.output_dims.items():
        model.output_dims[name] = tuple(
            [dims.get(d, d) if isinstance(d, str) else d for d in shape]
        )
    for value in model.graph.inputs:
        if isinstance(value.type, TensorType) and value.type.shape is not None:
            sizes = [dims.get(d, d) if isinstance(d, str) else d for d in value.type.shape]
            value.type = TensorType(value.type.dtype, tuple(sizes))
