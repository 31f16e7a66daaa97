"""Threads of torch are bounded, and put back."""

from __future__ import annotations

import pytest

from tests.backends.torch.test_memory import CHAIN, X
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_threads_bound_those_of_torch_and_are_put_back(executor):
    import torch

    from penstock.backends.torch.backend import TorchBackend

    seen = []
    backend = TorchBackend("cpu")
    kernel_of = backend.kernel

    def watched(node, types):
        kernel = kernel_of(node, types)

        def function(*inputs):
            seen.append(torch.get_num_threads())
            return kernel.function(*inputs)

        return None if kernel is None else type(kernel)(function)

    backend.kernel = watched
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        session = compile_text(CHAIN, backends=[backend], executor=executor, threads=1)
        session(X)
        seen.clear()
        session(X)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
        free = compile_text(CHAIN, backends=[backend], executor=executor)
        free(X)
        seen.clear()
        free(X)
        assert set(seen) == {3}
    finally:
        torch.set_num_threads(before)


def test_bounds_that_overlap_hold_until_the_last_of_them_leaves():
    import torch

    from penstock.backends.torch.threads import ThreadBound

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    bound, seen = ThreadBound(), []
    try:
        inner = bound.bounded(2, lambda: seen.append(torch.get_num_threads()))
        bound.bounded(3, lambda: [seen.append(torch.get_num_threads()), inner()])()
        assert seen == [3, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
