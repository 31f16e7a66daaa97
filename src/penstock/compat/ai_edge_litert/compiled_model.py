"""``CompiledModel``: LiteRT's newer interface, with buffers for inputs and outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.compat.ai_edge_litert.environment import Environment, EnvironmentOptions
from penstock.compat.ai_edge_litert.hardware_accelerator import HardwareAccelerator
from penstock.compat.ai_edge_litert.interpreter import Interpreter
from penstock.compat.ai_edge_litert.options import CpuOptions, Options, without_effect
from penstock.compat.ai_edge_litert.tensor_buffer import TensorBuffer
from penstock.compat.ai_edge_litert.tensors import Details
from penstock.core import Closeable
from penstock.core.errors import PenstockError, warn
from penstock.core.types import TensorType, dtype_name

_PLACEHOLDER = "<placeholder signature>"  # of a file without signatures


class _Signature:
    """One signature: its key, None for a file without; the details of its tensors by name, and the
    session that runs it."""

    def __init__(self, interpreter: Interpreter, key: str | None) -> None:
        file = interpreter._file
        self.session = interpreter._session if key is None else interpreter._compiled(key)
        subgraph = file.subgraphs[0 if key is None else file.signatures[key].subgraph]
        if key is None:
            numbers = [subgraph.inputs, subgraph.outputs]
            ports = [self.session.inputs, self.session.outputs]
            inputs, outputs = (
                {port.name: i for i, port in zip(own, named, strict=True)}
                for own, named in zip(numbers, ports, strict=True)
            )
        else:
            entry = file.signatures[key]
            inputs, outputs = dict(entry.inputs), dict(entry.outputs)
        self.inputs = {name: _details(name, subgraph.tensors[i]) for name, i in inputs.items()}
        self.outputs = {name: _details(name, subgraph.tensors[i]) for name, i in outputs.items()}
        self._infer()

    def resize(self, name: str, dims: Sequence[int], strict: bool) -> None:
        details = self.inputs[name]
        new, declared = [int(dim) for dim in dims], details["shape_signature"]
        fits = len(declared) == len(new) and all(
            dim in (-1, n) for dim, n in zip(declared, new, strict=True)
        )
        if strict and not fits:
            raise RuntimeError(f"New shape {new} is not compatible with {declared}.")
        details["shape"] = new
        self._infer()

    def _infer(self) -> None:
        """Compile the plan for the dims of the inputs, which tells those of the outputs."""
        shapes = {name: tuple(details["shape"]) for name, details in self.inputs.items()}
        try:
            table = self.session._executors._ahead(shapes).table
        except PenstockError as error:
            raise RuntimeError(str(error)) from error
        for details, slot in zip(self.outputs.values(), table.outputs, strict=True):
            type_ = table.slots[slot].type
            if isinstance(type_, TensorType) and type_.static:
                details["shape"] = list(type_.shape or ())

    def run(self, inputs: Mapping[str, TensorBuffer], outputs: Mapping[str, TensorBuffer]) -> None:
        for given, own in ((inputs, self.inputs), (outputs, self.outputs)):
            if given.keys() != own.keys():
                raise RuntimeError(f"buffers of {list(given)} given, not of {list(own)}")
        shapes = {name: details["shape"] for name, details in self.inputs.items()}
        try:
            feeds = {name: buffer.array.reshape(shapes[name]) for name, buffer in inputs.items()}
            results = self.session.run(feeds, list(outputs))
        except (PenstockError, ValueError) as error:
            raise RuntimeError(str(error)) from error
        for name, buffer in outputs.items():
            buffer.take(results[name])


def _details(name: str, tensor: Details) -> Details:
    return {
        "name": name,
        "index": tensor["index"],
        "dtype": dtype_name(np.dtype(tensor["dtype"])),
        "shape": tensor["shape"].tolist(),
        "shape_signature": tensor["shape_signature"].tolist(),
    }


class CompiledModel(Closeable):
    """A model of a TFLite file, with buffers that the caller makes, fills and reads.

    Args:
        interpreter: The model.
        environment: The environment, which is kept.
    """

    def __init__(self, interpreter: Interpreter, environment: Environment) -> None:
        self._environment = environment
        keys = list(interpreter._file.signatures)
        made = {key: _Signature(interpreter, key) for key in keys}
        self._signatures = made or {_PLACEHOLDER: _Signature(interpreter, None)}

    @classmethod
    def from_file(
        cls,
        model_path: str | os.PathLike[str],
        hardware_accel: HardwareAccelerator | None = None,
        environment: Environment | None = None,
        options: Options | None = None,
    ) -> CompiledModel:
        """The model of a file. Raises ``RuntimeError`` if it cannot be read, and for devices
        without the processor; warns of options without effect.

        Args:
            model_path: The path.
            hardware_accel: Devices that it may run on.
            environment: Kept, without effect.
            options: By default one thread, as in LiteRT; instead of ``hardware_accel``.
        """
        return cls._made(
            {"model_path": model_path}, _resolved(hardware_accel, options), environment
        )

    @classmethod
    def from_buffer(
        cls,
        model_data: bytes,
        hardware_accel: HardwareAccelerator | None = None,
        environment: Environment | None = None,
        options: Options | None = None,
    ) -> CompiledModel:
        """The model of the bytes of a file; as ``from_file``."""
        return cls._made(
            {"model_content": model_data}, _resolved(hardware_accel, options), environment
        )

    @classmethod
    def _made(
        cls, source: Mapping[str, object], options: Options, environment: Environment | None
    ) -> CompiledModel:
        try:
            threads = options.cpu_options.num_threads or None
            interpreter = Interpreter(**source, num_threads=threads)  # type: ignore[arg-type]
        except ValueError as error:
            raise RuntimeError(f"Failed to load model: {error}") from error
        return cls(interpreter, environment or Environment(EnvironmentOptions()))

    def close(self) -> None:
        """Close the sessions."""
        for signature in self._signatures.values():
            signature.session.close()

    @property
    def environment(self) -> Environment:
        """The environment that it was made with."""
        return self._environment

    # Signatures.

    def get_signature_list(self) -> dict[str, dict[str, list[str]]]:
        """The names of inputs and outputs, by signature."""
        return {
            key: {"inputs": list(one.inputs), "outputs": list(one.outputs)}
            for key, one in self._signatures.items()
        }

    def get_signature_by_index(self, index: int) -> dict[str, object]:
        """The key and the names of a signature.

        Args:
            index: Its number.
        """
        key = list(self._signatures)[index]
        return {"key": key, **self.get_signature_list()[key]}

    def get_num_signatures(self) -> int:
        """The number of signatures."""
        return len(self._signatures)

    def get_signature_index(self, key: str) -> int:
        """The number of a signature, -1 if there is none such.

        Args:
            key: Its name.
        """
        return list(self._signatures).index(key) if key in self._signatures else -1

    def get_input_tensor_details(self, signature_key: str) -> dict[str, Details]:
        """The names, numbers, dtypes and dims of inputs.

        Args:
            signature_key: The signature.
        """
        return _shown(self._signature(signature_key).inputs)

    def get_output_tensor_details(self, signature_key: str) -> dict[str, Details]:
        """The same of outputs.

        Args:
            signature_key: The signature.
        """
        return _shown(self._signature(signature_key).outputs)

    def _signature(self, key: str | int) -> _Signature:
        if isinstance(key, int):
            if not 0 <= key < len(self._signatures):
                raise RuntimeError(f"there is no signature {key}")
            return list(self._signatures.values())[key]
        if key not in self._signatures:
            raise RuntimeError(f"there is no signature {key!r}; there are {[*self._signatures]}")
        return self._signatures[key]

    def is_fully_accelerated(self) -> bool:
        """True: all operations run on the processor's kernels."""
        return True

    # Buffers.

    def get_input_buffer_requirements(self, input_index: int, signature_index: int = 0) -> Details:
        """The bytes of an input.

        Args:
            input_index: Its number in the signature.
            signature_index: The number of the signature.
        """
        return _requirements(self.create_input_buffers(signature_index)[input_index])

    def get_output_buffer_requirements(
        self, output_index: int, signature_index: int = 0
    ) -> Details:
        """The bytes of an output.

        Args:
            output_index: Its number in the signature.
            signature_index: The number of the signature.
        """
        return _requirements(self.create_output_buffers(signature_index)[output_index])

    def create_input_buffers(self, signature_index: int) -> list[TensorBuffer]:
        """Buffers of zeros for all inputs.

        Args:
            signature_index: The number of the signature.
        """
        return [_buffer(details) for details in self._signature(signature_index).inputs.values()]

    def create_output_buffers(self, signature_index: int) -> list[TensorBuffer]:
        """Buffers for all outputs.

        Args:
            signature_index: The number of the signature.
        """
        return [_buffer(details) for details in self._signature(signature_index).outputs.values()]

    def create_input_buffer_by_name(self, signature_key: str, input_name: str) -> TensorBuffer:
        """A buffer of zeros for one input.

        Args:
            signature_key: The signature.
            input_name: The input; another name raises ``RuntimeError``.
        """
        return _buffer(_named(self._signature(signature_key).inputs, input_name))

    def create_output_buffer_by_name(self, signature_key: str, output_name: str) -> TensorBuffer:
        """A buffer for one output.

        Args:
            signature_key: The signature.
            output_name: The output; another name raises ``RuntimeError``.
        """
        return _buffer(_named(self._signature(signature_key).outputs, output_name))

    def resize_input_tensor(
        self, input_index: int, dims: Sequence[int], signature_index: int = 0, strict: bool = True
    ) -> None:
        """Let an input have other dims; buffers made before keep theirs.

        Args:
            input_index: Its number in the signature.
            dims: The new dims.
            signature_index: The number of the signature.
            strict: Whether only dims that the file leaves open may change; others raise
                ``RuntimeError``.
        """
        signature = self._signature(signature_index)
        signature.resize(list(signature.inputs)[input_index], dims, strict)

    def resize_input_tensor_by_name(
        self, signature_key: str, input_name: str, dims: Sequence[int], strict: bool = True
    ) -> None:
        """``resize_input_tensor`` by names, of which others raise ``ValueError``.

        Args:
            signature_key: The signature.
            input_name: The input.
            dims: The new dims.
            strict: Whether only dims that the file leaves open may change.
        """
        if input_name not in self.get_signature_list().get(signature_key, {}).get("inputs", ()):
            raise ValueError(f"Unknown input {input_name!r} for signature {signature_key!r}")
        self._signatures[signature_key].resize(input_name, dims, strict)

    # Runs.

    def run_by_name(
        self,
        signature_key: str,
        input_map: Mapping[str, TensorBuffer],
        output_map: Mapping[str, TensorBuffer],
    ) -> None:
        """Run a signature. Raises ``RuntimeError`` for whatever goes wrong.

        Args:
            signature_key: The signature.
            input_map: Buffers of all inputs.
            output_map: Buffers of all outputs, which are written.
        """
        self._signature(signature_key).run(input_map, output_map)

    def run_by_index(
        self,
        signature_index: int,
        input_buffers: Sequence[TensorBuffer],
        output_buffers: Sequence[TensorBuffer],
    ) -> None:
        """``run_by_name`` with lists of buffers.

        Args:
            signature_index: The number of the signature.
            input_buffers: Buffers of all inputs.
            output_buffers: Buffers of all outputs, which are written.
        """
        signature = self._signature(signature_index)
        if len(input_buffers) != len(signature.inputs):
            raise RuntimeError(f"{len(input_buffers)} inputs given, not {len(signature.inputs)}")
        if len(output_buffers) != len(signature.outputs):
            raise RuntimeError(f"{len(output_buffers)} outputs given, not {len(signature.outputs)}")
        inputs = dict(zip(signature.inputs, input_buffers, strict=True))
        signature.run(inputs, dict(zip(signature.outputs, output_buffers, strict=True)))


def _resolved(devices: HardwareAccelerator | None, options: Options | None) -> Options:
    """The options of a model; warns of those that have no effect."""
    if options is not None and devices is not None:
        raise ValueError("Pass either options or hardware_accel, not both.")
    if options is None:
        chosen = HardwareAccelerator.CPU if devices is None else devices
        options = Options(chosen, CpuOptions(num_threads=1))
    wanted = HardwareAccelerator(int(options.hardware_accelerators))
    if not wanted & HardwareAccelerator.CPU:
        raise RuntimeError(f"{wanted!r}: models run on the processor here; add CPU to the devices")
    ignored = without_effect(options)
    if wanted != HardwareAccelerator.CPU:
        ignored.insert(0, repr(wanted & ~HardwareAccelerator.CPU))
    if ignored:
        warn(f"options without effect on Penstock: {', '.join(ignored)}")
    return options


def _named(tensors: Mapping[str, Details], name: str) -> Details:
    if name not in tensors:
        raise RuntimeError(f"tensor not found: {name}; there are {list(tensors)}")
    return tensors[name]


def _shown(tensors: Mapping[str, Details]) -> dict[str, Details]:
    keys = ("name", "index", "dtype", "shape")
    return {name: {key: details[key] for key in keys} for name, details in tensors.items()}


def _buffer(details: Details) -> TensorBuffer:
    return TensorBuffer(np.zeros(details["shape"], details["dtype"]))


def _requirements(buffer: TensorBuffer) -> Details:
    return {"buffer_size": buffer.array.nbytes, "supported_types": [1]}
