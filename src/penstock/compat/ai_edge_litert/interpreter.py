"""``Interpreter``: LiteRT's interpreter on top of Penstock's sessions.

Plans are compiled when they are needed, for the dims that inputs have: ``allocate_tensors`` and
``resize_tensor_input`` take no time. Delegates have no counterpart, and are refused.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.compat.ai_edge_litert.tensors import Details, read_tensors
from penstock.core.errors import PenstockError
from penstock.core.types import STRING, RunValue
from penstock.executors.variables import Variables
from penstock.session.session import Session, compile


@enum.unique
class OpResolverType(enum.Enum):
    """The kernels that LiteRT uses; here all are the same."""

    AUTO = 0
    BUILTIN = 1
    BUILTIN_REF = 2
    BUILTIN_WITHOUT_DEFAULT_DELEGATES = 3


class Delegate:
    """Not available: a delegate is a library that is built for LiteRT.

    Args:
        library: Its file.
        options: Its options.
    """

    def __init__(self, library: str, options: object = None) -> None:
        load_delegate(library)


def load_delegate(library: str, options: object = None) -> NoReturn:
    """Not available: raises ``ValueError``.

    Args:
        library: Its file.
        options: Its options.
    """
    raise ValueError(f"there is no delegate {library!r} here: kernels are Penstock's own")


class Interpreter:
    """A model of a TFLite file.

    Args:
        model_path: The file of a model.
        model_content: The bytes of a model, instead of a file.
        experimental_delegates: Delegates, which raise ``ValueError``.
        num_threads: Cores that a run may keep busy; by default all of the process.
        experimental_op_resolver_type: Not looked at: codes of 8 bits are those of BUILTIN_REF.
        experimental_preserve_all_tensors: Raises ``ValueError``: fetch values by their names.
        experimental: Not looked at.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        model_content: bytes | None = None,
        experimental_delegates: Sequence[object] | None = None,
        num_threads: int | None = None,
        experimental_op_resolver_type: OpResolverType = OpResolverType.AUTO,
        experimental_preserve_all_tensors: bool = False,
        **experimental: object,
    ) -> None:
        if experimental_delegates:
            load_delegate(str(experimental_delegates[0]))
        if experimental_preserve_all_tensors:
            raise ValueError(
                "experimental_preserve_all_tensors: fetch what you want to see by its name, with "
                "penstock.compile(path).run(feeds, [name])"
            )
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise ValueError("num_threads should be an int of at least 1")
        if (model_path is None) == (model_content is None):
            raise ValueError("exactly one of `model_path` and `model_content` must be given")
        self._source: Any = model_path if model_path is not None else bytes(model_content or b"")
        self._threads = num_threads
        self._variables: Variables | None = None
        try:
            self._file = read_tensors(self._source)
            self._session = self._compiled(None)
        except (OSError, PenstockError) as error:
            raise ValueError(f"Could not open {model_path or 'the model'}: {error}") from error
        main = self._file.subgraphs[0]
        self._inputs = dict(zip(main.inputs, self._session.inputs, strict=True))
        self._outputs = dict(zip(main.outputs, self._session.outputs, strict=True))
        self._shapes = {i: tuple(main.tensors[i]["shape"].tolist()) for i in main.inputs}
        self._fed: dict[str, np.ndarray] = {}
        self._results: dict[str, np.ndarray] = {}
        self._allocated = False

    def _compiled(self, signature: str | None) -> Session:
        """A session of a signature, or of the first subgraph; all have the same variables."""
        shared = self._variables
        session = compile(
            self._source, threads=self._threads, signature=signature, variables=shared
        )
        if shared is None and session.variables:
            self._variables = session.variables
        return session

    def allocate_tensors(self) -> None:
        """Let inputs be set."""
        self._allocated = True

    def get_input_details(self) -> list[Details]:
        """The tensors of the inputs, with the dims to which they were resized."""
        tensors = self._file.subgraphs[0].tensors
        return [{**tensors[i], "shape": np.array(self._shapes[i], np.int32)} for i in self._inputs]

    def get_output_details(self) -> list[Details]:
        """The tensors of the outputs, with the dims that they had in the last run, or else as
        declared."""
        found = []
        for i, port in self._outputs.items():
            details = self._file.subgraphs[0].tensors[i]
            if self._results:
                shape = self._results[port.name].shape
                details = {**details, "shape": np.array(shape, np.int32)}
            found.append(details)
        return found

    def get_tensor_details(self, subgraph_index: int = 0) -> list[Details]:
        """All tensors of a subgraph. Raises ``ValueError`` if there is no such subgraph.

        Args:
            subgraph_index: The number of the subgraph.
        """
        if not 0 <= subgraph_index < len(self._file.subgraphs):
            raise ValueError(
                f"subgraph_index is out of range: {subgraph_index} for the model, which has "
                f"{len(self._file.subgraphs)} subgraphs."
            )
        return list(self._file.subgraphs[subgraph_index].tensors.values())

    def num_subgraphs(self) -> int:
        """The number of subgraphs of the file."""
        return len(self._file.subgraphs)

    def resize_tensor_input(
        self, input_index: int, tensor_size: Sequence[int], strict: bool = False
    ) -> None:
        """Let an input have other dims.

        Args:
            input_index: The number of its tensor.
            tensor_size: The new dims.
            strict: Whether only dims that the file leaves open may change; others raise
                ``RuntimeError``.
        """
        details = self._input(input_index)
        size = tuple(int(dim) for dim in tensor_size)
        declared = details["shape_signature"].tolist()
        if strict and (
            len(declared) != len(size)
            or any(dim not in (-1, new) for dim, new in zip(declared, size, strict=True))
        ):
            raise RuntimeError(
                f"ResizeInputTensorStrict only allows mutating unknown dimensions identified by "
                f"-1: {list(size)} does not fit {declared}"
            )
        self._shapes[int(input_index)] = size
        self._fed.pop(self._inputs[int(input_index)].name, None)
        # LiteRT wants ``allocate_tensors`` anew after that.
        self._allocated = False

    def set_tensor(self, tensor_index: int, value: RunValue) -> None:
        """Copy an array into an input. Raises ``ValueError`` for another dtype or other dims than
        the input has.

        Args:
            tensor_index: The number of an input's tensor.
            value: An array.
        """
        details, array = self._input(tensor_index), np.asarray(value)
        # LiteRT has strings as bytes.
        if details["dtype"] is np.bytes_:
            array = array.astype(STRING)
        elif array.dtype != details["dtype"]:
            raise ValueError(
                f"Cannot set tensor: Got value of type {array.dtype.name.upper()} but expected "
                f"type {np.dtype(details['dtype']).name.upper()} for input {tensor_index}, "
                f"name: {details['name']}"
            )
        if array.shape != self._shapes[int(tensor_index)]:
            raise ValueError(
                f"Cannot set tensor: Dimension mismatch. Got {list(array.shape)} but expected "
                f"{list(self._shapes[int(tensor_index)])} for input {tensor_index}."
            )
        np.copyto(self._buffer(int(tensor_index)), array)

    def _input(self, index: int) -> Details:
        if int(index) not in self._inputs:
            raise ValueError(f"tensor {index} is no input; these are {list(self._inputs)}")
        if not self._file.subgraphs[0].tensors[int(index)]:
            raise ValueError("Could not get tensor details")
        return self._file.subgraphs[0].tensors[int(index)]

    def _buffer(self, index: int) -> np.ndarray:
        """The memory of an input, of zeros at first."""
        if not self._allocated:
            raise ValueError("Cannot set tensor: call allocate_tensors() first")
        details, name = self._input(index), self._inputs[index].name
        array = self._fed.get(name)
        if array is None:
            dtype = STRING if details["dtype"] is np.bytes_ else details["dtype"]
            array = self._fed[name] = np.zeros(self._shapes[index], dtype)
            if dtype == STRING:
                array.fill("")
        return array

    def invoke(self) -> None:
        """Run the model. Raises ``RuntimeError`` if it fails, or tensors are not allocated."""
        if not self._allocated:
            raise RuntimeError("Invoke called on model that is not ready: allocate_tensors() first")
        if len(self._fed) < len(self._inputs):
            for i in self._inputs:
                self._buffer(i)
        try:
            self._results = self._session.run(self._fed)
        except PenstockError as error:
            raise RuntimeError(str(error)) from error

    def get_tensor(self, tensor_index: int, subgraph_index: int = 0) -> np.ndarray:
        """A copy of an input or an output. Raises ``ValueError`` for other tensors, other
        subgraphs, and for an output before the first run.

        Args:
            tensor_index: The number of the tensor.
            subgraph_index: 0, the subgraph of the inputs and outputs.
        """
        if subgraph_index != 0:
            raise ValueError(
                f"subgraph {subgraph_index}: only inputs and outputs of the first, 0, can be read"
            )
        return self._value(int(tensor_index)).copy()

    def tensor(self, tensor_index: int) -> Callable[[], np.ndarray]:
        """A function that returns an input or an output itself: what is written into an input is
        fed, and an output is that of the last run.

        Args:
            tensor_index: The number of the tensor.
        """
        return lambda: self._value(int(tensor_index))

    def _value(self, index: int) -> np.ndarray:
        if index in self._outputs and self._results:
            value = self._results[self._outputs[index].name]
            if value.dtype != STRING:
                return value
            # LiteRT gives strings as bytes.
            return np.array([x.encode() for x in value.flat]).reshape(value.shape)
        if index in self._inputs:
            return self._buffer(index)
        if index in self._outputs:
            raise ValueError("Tensor data is null: call invoke() first")
        raise ValueError(
            f"tensor {index} is neither an input nor an output; penstock.compile(path).run(feeds, "
            "[name]) fetches any value by its name"
        )

    def reset_all_variables(self) -> None:
        """Set what recurrent layers keep to zero. Variables that the model assigns stay, as they do
        in LiteRT."""
        from penstock.frontends.tflite.rules_control import STATE

        variables = self._session.variables
        variables.reset([name for name in variables if name.startswith(STATE)])

    # Signatures.

    def get_signature_list(self) -> dict[str, dict[str, list[str]]]:
        """The names of inputs and outputs, by signature."""
        return {
            key: {"inputs": list(entry.inputs), "outputs": list(entry.outputs)}
            for key, entry in self._file.signatures.items()
        }

    def get_signature_runner(self, signature_key: str | None = None) -> SignatureRunner:
        """A function that runs a signature.

        Args:
            signature_key: Its name; may be left out if there is one only.
        """
        if signature_key is None:
            if len(self._file.signatures) != 1:
                raise ValueError(
                    "SignatureDef signature_key is None and model has "
                    f"{len(self._file.signatures)} Signatures: name one of them"
                )
            signature_key = next(iter(self._file.signatures))
        return SignatureRunner(self, signature_key)


class SignatureRunner:
    """Runs one signature, with the variables of the interpreter.

    Args:
        interpreter: The interpreter of the model.
        signature_key: The name of the signature.
    """

    def __init__(self, interpreter: Interpreter, signature_key: str) -> None:
        signatures = interpreter._file.signatures
        if signature_key not in signatures:
            raise ValueError(f'Invalid signature_key provided: "{signature_key}".')
        self._signature = signatures[signature_key]
        self._tensors = interpreter._file.subgraphs[self._signature.subgraph].tensors
        self._session = interpreter._compiled(signature_key)

    def __call__(self, **inputs: RunValue) -> dict[str, np.ndarray]:
        """The outputs by name. Raises ``ValueError`` for wrong names and values."""
        expected = self._signature.inputs
        if inputs.keys() != expected.keys():
            raise ValueError(
                f"Invalid inputs provided for running a SignatureDef: {list(inputs)} instead of "
                f"{list(expected)}"
            )
        try:
            return self._session.run(inputs, list(self._signature.outputs))
        except PenstockError as error:
            raise ValueError(str(error)) from error

    def get_input_details(self) -> dict[str, Details]:
        """The tensors of the inputs by name."""
        return {name: self._tensors[i] for name, i in self._signature.inputs.items()}

    def get_output_details(self) -> dict[str, Details]:
        """The tensors of the outputs by name."""
        return {name: self._tensors[i] for name, i in self._signature.outputs.items()}
