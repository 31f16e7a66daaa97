"""Kernels of the torch backend, against the NumPy kernels that define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.backends.registry import missing
from penstock.core.types import TensorType, Type, type_of
from penstock.ir.graph import Node
from penstock.testing import assert_same

needs_torch = pytest.mark.skipif(missing("torch") is not None, reason=str(missing("torch")))
"""marks tests that need torch"""


def types_of(node: Node, values: Sequence[Any], *, known: bool) -> list[Type | None]:
    """The types of these values; unless ``known``, without dims but for constants. Those of the
    node's inputs and outputs become these, too."""
    types: list[Type | None] = [None if x is None else type_of(x) for x in values]
    if not known:
        types = [
            TensorType(type_.dtype, (None,) * len(type_.shape or ()))
            if isinstance(type_, TensorType) and value is not None and value.const is None
            else type_
            for type_, value in zip(types, node.inputs, strict=True)
        ]
    consts = [None if v is None else v.const for v in node.inputs]
    outputs = node.op.infer(types, node.attrs, consts)
    for value, type_ in zip((*node.inputs, *node.outputs), (*types, *outputs), strict=False):
        if value is not None and type_ is not None:
            value.type = type_
    return types


def check_torch_kernel(
    node: Node, values: Sequence[Any], wanted: Sequence[Any], *, known: bool = True
) -> bool:
    """Check the kernel of a node on torch's CPU device in each form that it has, against
    ``wanted``; whether there is one."""
    import torch

    from penstock.backends.torch.backend import TorchBackend

    backend = TorchBackend("cpu")
    kernel = backend.kernel(node, types_of(node, values, known=known))
    if kernel is None:
        return False
    inputs = [
        x if x is None or i in kernel.device.host_inputs else backend.from_host(x)
        for i, x in enumerate(values)
    ]
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.inference_mode():
        result = kernel.function(*inputs)
    outputs = result if isinstance(result, tuple | list) else (result,)
    assert len(outputs) == len(node.outputs)
    for value, output, want in zip(node.outputs, outputs, wanted, strict=True):
        if value is not None:
            on_host = output if kernel.device.host_outputs else backend.to_host(output)
            tolerance = 2e-2 if np.asarray(want).dtype.itemsize == 2 else 1e-4
            assert_same(on_host, np.asarray(want), tolerance, tolerance / 10)
    for x, copy in zip(inputs, copies, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(), copy.nan_to_num()), "the kernel wrote to its input"
    if kernel.into is not None:
        assert not kernel.view
        for strided in (False, True)[: 2 - kernel.layout.contiguous]:
            memory = [
                None if v is None else _garbage(x, strided)
                for v, x in zip(node.outputs, outputs, strict=True)
            ]
            kernel.into(*inputs, *memory)
            for into, output in zip(memory, outputs, strict=True):
                if into is not None:
                    torch.testing.assert_close(into, output, equal_nan=True)
    return True


def _garbage(like: Any, strided: bool) -> Any:
    """Memory for an output, full of what no kernel may rely on."""
    import torch

    if not strided or like.dim() == 0:
        return torch.full_like(like, 1, memory_format=torch.contiguous_format)
    return like.new_ones((*like.shape[:-1], 2 * like.shape[-1]))[..., ::2]


def inference_modes(backend: Any) -> list[bool]:
    """Whether torch is in its inference mode, for each kernel of ``backend`` that runs from now on:
    a list that grows."""
    import torch

    seen: list[bool] = []
    kernel_of = backend.kernel

    def watched(node, types):
        kernel = kernel_of(node, types)
        if kernel is None:
            return kernel

        def function(*inputs):
            seen.append(torch.is_inference_mode_enabled())
            return kernel.function(*inputs)

        return type(kernel)(function)

    backend.kernel = watched
    return seen
