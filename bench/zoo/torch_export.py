"""Export of torch modules by both of torch's exporters, and what torch answers."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from bench.zoo.store import EXACT, Case, Product, Recipe

if TYPE_CHECKING:
    import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
EXPORTERS = ("dynamo", "script")


@dataclass(frozen=True)
class Feed:
    """An input: ``make`` gives it for a number of rows. Without ``batched`` it is the same for any,
    and its dims are fixed."""

    make: Callable[[np.random.Generator, int], np.ndarray]
    batched: bool = True


@dataclass(frozen=True)
class Network:
    """``build`` makes a module, which is called with ``feeds`` in their order.

    ``rows`` are the numbers of rows of the cases "row" and "batch". ``names`` are those of the
    module's arguments, where these are passed by name.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    feeds: Sequence[Feed]
    rows: tuple[int, int] = (1, 8)
    names: Sequence[str] = ()
    tolerance: float = EXACT


def normal(*shape: int) -> Feed:
    return Feed(lambda rng, rows: rng.standard_normal((rows, *shape)).astype(np.float32))


def positive(*shape: int) -> Feed:
    """Between 0 and 1."""
    return Feed(lambda rng, rows: rng.random((rows, *shape)).astype(np.float32))


def whole(below: int, *shape: int, dtype: type = np.int64) -> Feed:
    return Feed(lambda rng, rows: rng.integers(0, below, (rows, *shape)).astype(dtype))


def flags(*shape: int) -> Feed:
    return Feed(lambda rng, rows: rng.random((rows, *shape)) > 0.5)


def ones(*shape: int) -> Feed:
    """A mask that hides nothing."""
    return Feed(lambda rng, rows: np.ones((rows, *shape), np.int64))


def fixed(array: np.ndarray) -> Feed:
    return Feed(lambda rng, rows: array, batched=False)


def recipes(networks: Sequence[Network]) -> Iterator[Recipe]:
    """Each network by each exporter."""
    for network in networks:
        for exporter in EXPORTERS:
            yield Recipe(
                f"{network.name}_{exporter}",
                lambda network=network, exporter=exporter: product(network, exporter),
                network.tolerance,
            )


def product(network: Network, exporter: str) -> Product:
    """The model with a batch of any size; of the size of the batch alone where the module, or the
    exporter, takes no other."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = network.build().eval().requires_grad_(False)
    rows = {"row": network.rows[0], "batch": network.rows[1]}
    inputs = {case: _inputs(network, number) for case, number in rows.items()}
    export = _dynamo if exporter == "dynamo" else _script
    batched = any(feed.batched for feed in network.feeds)
    try:
        model = export(network, module, inputs["batch"], batched)
        answers = {case: _call(network, module, arrays) for case, arrays in inputs.items()}
        cases = _cases(model, network, inputs, answers)
    except TimeoutError:
        raise
    except Exception:
        if not batched:
            raise
        model = export(network, module, inputs["batch"], False)
        answers = {"batch": _call(network, module, inputs["batch"])}
        cases = _cases(model, network, {"batch": inputs["batch"]}, answers)
    return Product(model, cases)


def _inputs(network: Network, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [feed.make(rng, rows) for feed in network.feeds]


def _input_names(network: Network) -> list[str]:
    return list(network.names or (f"x{number}" for number in range(len(network.feeds))))


def _cases(
    model: bytes, network: Network, inputs: dict[str, list[np.ndarray]], answers: dict[str, Any]
) -> dict[str, Case]:
    """The feeds of those inputs that the model has; exporters drop what the module does not use."""
    wanted = {value.name for value in onnx.load_from_string(model).graph.input}
    names = _input_names(network)
    return {
        case: Case({n: a for n, a in zip(names, arrays, strict=True) if n in wanted}, answers[case])
        for case, arrays in inputs.items()
    }


def _call(network: Network, module: torch.nn.Module, arrays: list[np.ndarray]) -> list[Any]:
    import torch

    args, kwargs = _arguments(network, arrays)
    with torch.inference_mode():
        outputs = module(*args, **kwargs)
    return [each.numpy() if hasattr(each, "numpy") else each for each in _leaves(outputs)]


def _leaves(outputs: Any) -> list[Any]:
    from torch.utils import _pytree

    return [each for each in _pytree.tree_leaves(outputs) if each is not None]


def _arguments(
    network: Network, arrays: list[np.ndarray]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    if network.names:
        return (), dict(zip(network.names, tensors, strict=True))
    return tuple(tensors), {}


def _dynamo(network: Network, module: Any, arrays: list[np.ndarray], dynamic: bool) -> bytes:
    import torch

    _keep_registry()
    args, kwargs = _arguments(network, arrays)
    shapes: Any = None
    if dynamic:
        dims = [{0: "batch"} if feed.batched else {} for feed in network.feeds]
        shapes = dict(zip(network.names, dims, strict=True)) if network.names else tuple(dims)
        if isinstance(module, function_module()):
            shapes = (shapes,)
    program = torch.onnx.export(
        module, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False,
        input_names=_input_names(network),
    )  # fmt: skip
    assert program is not None
    return program.model_proto.SerializeToString()


def _script(network: Network, module: Any, arrays: list[np.ndarray], dynamic: bool) -> bytes:
    import torch

    args, kwargs = _arguments(network, arrays)
    names = _input_names(network)
    axes = {n: {0: "batch"} for n, feed in zip(names, network.feeds, strict=True) if feed.batched}
    file = io.BytesIO()
    torch.onnx.export(
        module, args, file, kwargs=kwargs, dynamo=False, input_names=names,
        dynamic_axes=axes if dynamic else None,
    )  # fmt: skip
    return file.getvalue()


@cache
def _keep_registry() -> None:
    """Make torch read its table of translations once, not at every export: that takes seconds."""
    from torch.onnx._internal.exporter import _registration

    registry: Any = _registration.ONNXRegistry
    registry.from_torchlib = staticmethod(cache(registry.from_torchlib))


@cache
def function_module() -> type:
    """The class of modules that call a function; torch is there when it is made."""
    import torch

    class Function(torch.nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.function(*inputs)

    return Function
