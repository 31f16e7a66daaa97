"""Export of torch modules by both of torch's exporters, and what torch answers."""

from __future__ import annotations

import io
import logging
import os
import sys
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
EXPORTERS = ("script", "dynamo")  # the quicker first


@dataclass(frozen=True)
class Feed:
    """An input: ``make`` gives it for a number of rows. Without ``batched`` it is the same for any,
    and its dims are fixed."""

    make: Callable[[np.random.Generator, int], np.ndarray]
    batched: bool = True


@dataclass(frozen=True)
class Network:
    """``build`` makes a module, which is called with ``feeds`` in their order.

    ``rows`` are the numbers of rows of the cases "row" and "batch"; ``names`` are those that the
    inputs get, x0 and so on by default.
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
    for exporter in EXPORTERS:
        for network in networks:
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
    declare_torchvision()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = network.build().eval().requires_grad_(False)
    rows = {"row": network.rows[0], "batch": network.rows[1]}
    feeds = {case: inputs(network, number) for case, number in rows.items()}
    export = _dynamo if exporter == "dynamo" else _script
    batched = any(feed.batched for feed in network.feeds)
    try:
        model = export(network, module, feeds["batch"], batched)
        answers = {case: _call(network, module, arrays) for case, arrays in feeds.items()}
        cases = _cases(model, network, feeds, answers)
    except TimeoutError:
        raise
    except Exception:
        if not batched:
            raise
        model = export(network, module, feeds["batch"], False)
        answers = {"batch": _call(network, module, feeds["batch"])}
        cases = _cases(model, network, {"batch": feeds["batch"]}, answers)
    return Product(model, cases)


def inputs(network: Network, rows: int) -> list[np.ndarray]:
    """What the network is fed with that many rows, in the order of its inputs."""
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

    with torch.inference_mode():
        outputs = module(*_tensors(arrays))
    return [each.numpy() if hasattr(each, "numpy") else each for each in _leaves(outputs)]


def _leaves(outputs: Any) -> list[Any]:
    from torch.utils import _pytree

    return [each for each in _pytree.tree_leaves(outputs) if each is not None]


def _tensors(arrays: list[np.ndarray]) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.from_numpy(array.copy()) for array in arrays)


def _dynamo(network: Network, module: Any, arrays: list[np.ndarray], dynamic: bool) -> bytes:
    import torch

    _keep_registry()
    shapes: Any = None
    if dynamic:
        shapes = tuple({0: "batch"} if feed.batched else {} for feed in network.feeds)
        if isinstance(module, function_module()):
            shapes = (shapes,)
    program = torch.onnx.export(
        module, _tensors(arrays), dynamo=True, dynamic_shapes=shapes, verbose=False,
        input_names=_input_names(network),
    )  # fmt: skip
    assert program is not None
    return program.model_proto.SerializeToString()


def _script(network: Network, module: Any, arrays: list[np.ndarray], dynamic: bool) -> bytes:
    import torch

    names = _input_names(network)
    axes = {n: {0: "batch"} for n, feed in zip(names, network.feeds, strict=True) if feed.batched}
    file = io.BytesIO()
    torch.onnx.export(
        module, _tensors(arrays), file, dynamo=False, input_names=names,
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
def declare_torchvision() -> None:
    """Let torchvision be imported where its compiled operations do not load, as those of a build
    for GPUs beside a torch without: networks but detectors do without them."""
    import torch

    try:
        from torchvision.extension import _has_ops

        if _has_ops():
            return
    except (ImportError, RuntimeError):
        pass
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES: list[Any] = []  # what is declared lasts as long as these


@cache
def function_module() -> type:
    """The class of modules that call a function, which may use ``inner``, another module; torch is
    there when it is made."""
    import torch

    class Function(torch.nn.Module):
        def __init__(
            self, function: Callable[..., Any], inner: torch.nn.Module | None = None
        ) -> None:
            super().__init__()
            self.function = function
            self.inner = inner

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.function(*inputs)

    return Function
