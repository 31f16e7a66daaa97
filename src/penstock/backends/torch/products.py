"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.backends.torch.elementwise import writing
from penstock.backends.torch.site import TorchSite, with_flag
from penstock.core.types import RunValue
from penstock.ir.kernel import Kernel


def rounding(site: TorchSite, function: Callable[..., RunValue]) -> Callable[..., RunValue]:
    """``function``, with operands of products rounded to TensorFloat-32 on a GPU if the session
    allows that."""
    if not site.tf32:
        return function
    return with_flag(site, function, torch.backends.cuda.matmul, "allow_tf32", True)


def matmul(site: TorchSite) -> Kernel | None:
    """MatMul, with NumPy's rules for more than two dims."""
    if not site.are_floats(0, 1) or 0 in (site.rank(0), site.rank(1)):
        return None
    return writing(rounding(site, torch.matmul), 2)


def gemm(site: TorchSite) -> Kernel | None:
    """Gemm: ``alpha a b + beta c``, where a and b may be transposed."""
    if not site.are_floats(0, 1, 2):
        return None
    attrs = site.attrs
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    turned_a, turned_b = attrs.get("transA", 0), attrs.get("transB", 0)
    addmm, product = rounding(site, torch.addmm), rounding(site, torch.mm)

    def function(
        a: Tensor, b: Tensor, c: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        if turned_a:
            a = a.t()
        if turned_b:
            b = b.t()
        if c is not None:
            return addmm(c, a, b, alpha=alpha, beta=beta, out=out)
        result = product(a, b, out=out)
        return result if alpha == 1 else result.mul_(alpha)

    return writing(function, 3)


def einsum(site: TorchSite) -> Kernel | None:
    """Einsum of floats."""
    if not site.are_floats(*range(len(site.node.inputs))):
        return None
    equation, compute = site.text("equation"), rounding(site, torch.einsum)
    return Kernel(lambda *tensors: compute(equation, *tensors))
