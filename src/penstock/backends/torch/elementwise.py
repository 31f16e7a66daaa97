"""Elementwise kernels: single functions of torch, and formulas of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.site import FLOATS, TorchSite
from penstock.core.records import replace
from penstock.ir.kernel import DeviceWork, Kernel, LayoutHints

_nn = torch._C._nn
"""activations that take ``out=``"""
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def writing(function: Callable[..., Any], count: int, *, inplace: tuple[int, ...] = ()) -> Kernel:
    """The kernel of a function of ``count`` tensors with a parameter ``out=``."""
    if count == 1:

        def into(x: Tensor, out: Tensor) -> None:
            function(x, out=out)
    elif count == 2:

        def into(x: Tensor, y: Tensor, out: Tensor) -> None:  # type: ignore[misc]
            function(x, y, out=out)
    else:

        def into(*tensors: Tensor) -> None:  # type: ignore[misc]
            function(*tensors[:-1], out=tensors[-1])

    return Kernel(function, into, inplace=inplace)


# Of one operand.

_REAL: Mapping[str, Callable[..., Any]] = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Log": torch.log,
    "Mish": _nn.mish,
    "Reciprocal": torch.reciprocal,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
"""functions of real numbers"""
_ROUNDING: Mapping[str, Callable[..., Any]] = {
    "Ceil": torch.ceil,
    "Floor": torch.floor,
    "Round": torch.round,
    "Sign": torch.sign,
}
_NUMERIC: Mapping[str, Callable[..., Any]] = {"Abs": torch.abs, "Neg": torch.neg}


def _relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


def _parametric(site: TorchSite) -> Callable[..., Any] | None:
    """An activation with parameters, as a function with ``out=``."""
    name, attrs = site.node.op.name, site.attrs
    alpha = attrs.get("alpha")
    if name == "LeakyRelu":
        slope = 0.01 if alpha is None else alpha
        return lambda x, out=None: _nn.leaky_relu(x, slope, out=out)
    if name == "Elu":
        return lambda x, out=None: _nn.elu(x, 1.0 if alpha is None else alpha, out=out)
    if name == "Selu":
        scale = attrs.get("gamma", 1.0507009873554805)
        factor = 1.6732632423543772 if alpha is None else alpha
        return lambda x, out=None: _nn.elu(x, factor, scale, out=out)
    if name == "Gelu":
        how = attrs.get("approximate", "none")
        how = how.decode() if isinstance(how, bytes) else how
        return lambda x, out=None: _nn.gelu(x, approximate=how, out=out)
    if name == "Swish" and (alpha is None or alpha == 1):
        return lambda x, out=None: _nn.silu(x, out=out)
    if name == "HardSigmoid":
        slope, offset = 0.2 if alpha is None else alpha, attrs.get("beta", 0.5)

        def hard_sigmoid(x: Tensor, out: Tensor | None = None) -> Tensor:
            out = torch.mul(x, slope, out=out)
            return out.add_(offset).clamp_(0, 1)

        return hard_sigmoid
    if name == "HardSwish":
        return lambda x, out=None: _nn.hardswish(x, out=out)
    if name == "Softplus":
        # torch's own is linear from a threshold on; the logarithm of a sum is exact everywhere.
        return lambda x, out=None: torch.logaddexp(x, torch.zeros_like(x), out=out)
    return None


_PARAMETRIC = ("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Selu", "Softplus", "Swish")


def _formula(site: TorchSite) -> Callable[[Tensor], Tensor] | None:
    """An activation that is several functions of torch."""
    name, alpha = site.node.op.name, site.attrs.get("alpha", 1.0)
    if name == "Celu":
        return lambda x: torch.celu(x, alpha)
    if name == "Softsign":
        return lambda x: x / x.abs().add_(1)
    if name == "ThresholdedRelu":
        return lambda x: torch.where(x > alpha, x, torch.zeros_like(x))
    if name == "Swish":
        return lambda x: torch.mul(x, alpha).sigmoid_().mul_(x)
    if name == "ZeroNaN":
        return lambda x: torch.where(torch.isnan(x), torch.zeros_like(x), x)
    return None


_FORMULAS = ("Celu", "Softsign", "Swish", "ThresholdedRelu", "ZeroNaN")


def unary(site: TorchSite) -> Kernel | None:
    """Functions and activations of one operand."""
    name, dtype = site.node.op.name, site.dtype(0)
    if name == "Not":
        return writing(torch.logical_not, 1, inplace=(0,)) if dtype is torch.bool else None
    if name == "BitwiseNot":
        return writing(torch.bitwise_not, 1, inplace=(0,)) if dtype in _INTEGERS else None
    if name == "IsNaN":
        return Kernel(torch.isnan) if dtype in FLOATS else None
    if name == "IsInf":
        return _is_inf(site) if dtype in FLOATS else None
    if name == "Relu":
        return writing(_relu, 1, inplace=(0,)) if dtype in FLOATS | _INTEGERS else None
    if name in _NUMERIC:
        return writing(_NUMERIC[name], 1, inplace=(0,)) if dtype in FLOATS | _INTEGERS else None
    if dtype not in FLOATS:
        return None
    function = _REAL.get(name) or _ROUNDING.get(name) or _parametric(site)
    if function is not None:
        kernel = writing(function, 1, inplace=(0,))
        # torch 2.13 writes wrong numbers to strided memory here.
        return replace(kernel, layout=LayoutHints(contiguous=True)) if name == "Gelu" else kernel
    formula = _formula(site)
    return None if formula is None else Kernel(formula)


UNARY = (
    *("BitwiseNot", "IsInf", "IsNaN", "Not", "Relu"),
    *(*_REAL, *_ROUNDING, *_NUMERIC),
    *dict.fromkeys((*_PARAMETRIC, *_FORMULAS)),
)


def _is_inf(site: TorchSite) -> Kernel:
    positive = site.attrs.get("detect_positive", 1)
    negative = site.attrs.get("detect_negative", 1)
    if positive and negative:
        return Kernel(torch.isinf)
    if positive:
        return writing(torch.isposinf, 1)
    if negative:
        return writing(torch.isneginf, 1)
    return Kernel(lambda x: torch.zeros_like(x, dtype=torch.bool))


# Of two operands and more.

_BINARY: Mapping[str, Callable[..., Any]] = {
    "Add": torch.add,
    "Mul": torch.mul,
    "Sub": torch.sub,
}
_LOGICAL: Mapping[str, Callable[..., Any]] = {
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
}
_BITWISE: Mapping[str, Callable[..., Any]] = {
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
_COMPARISONS: Mapping[str, Callable[..., Any]] = {
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
}


def _divisor_is_safe(site: TorchSite) -> bool:
    """Whether no element of a constant divisor is 0: torch raises an error for these."""
    divisor = site.const(1)
    return divisor is not None and bool(divisor.all())


def binary(site: TorchSite) -> Kernel | None:
    """Arithmetic, logic and comparisons of two operands of one type, which broadcast."""
    name, dtype = site.node.op.name, site.dtype(0)
    if dtype is None or dtype is not site.dtype(1):
        return None
    if name in _COMPARISONS:
        return writing(_COMPARISONS[name], 2)
    if name in _LOGICAL:
        return writing(_LOGICAL[name], 2, inplace=(0, 1)) if dtype is torch.bool else None
    if name in _BITWISE:
        return writing(_BITWISE[name], 2, inplace=(0, 1)) if dtype in _INTEGERS else None
    if dtype is torch.bool:
        return None
    if name in _BINARY:
        return writing(_BINARY[name], 2, inplace=(0, 1))
    if name == "Div":
        if dtype in FLOATS:
            return writing(torch.div, 2, inplace=(0, 1))
        divide = partial(torch.div, rounding_mode="trunc")
        return writing(divide, 2, inplace=(0, 1)) if _divisor_is_safe(site) else None
    if name == "Mod":
        if dtype not in FLOATS and not _divisor_is_safe(site):
            return None
        rest = torch.fmod if site.attrs.get("fmod") else torch.remainder
        return writing(rest, 2, inplace=(0, 1))
    if name == "Pow":
        return writing(torch.pow, 2, inplace=(0, 1)) if dtype in FLOATS else None
    if name == "PRelu" and dtype in FLOATS:
        return Kernel(lambda x, slope: torch.where(x < 0, x * slope, x))
    return None


BINARY = (*_BINARY, *_LOGICAL, *_BITWISE, *_COMPARISONS, "Div", "Mod", "PRelu", "Pow")


_VARIADIC: Mapping[str, Callable[..., Any]] = {
    "Max": torch.maximum,
    "Mean": torch.add,
    "Min": torch.minimum,
    "Sum": torch.add,
}
VARIADIC = tuple(_VARIADIC)


def variadic(site: TorchSite) -> Kernel | None:
    """One function of any number of operands, two at a time; their mean."""
    dtypes = {site.dtype(i) for i in range(len(site.node.inputs))}
    dtype = site.dtype(0)
    if len(dtypes) != 1 or dtype not in FLOATS | _INTEGERS:
        return None
    name, count = site.node.op.name, len(site.node.inputs)
    function = _VARIADIC[name]
    if name == "Mean":
        return Kernel(lambda *x: reduce(torch.add, x) / count) if dtype in FLOATS else None
    if count == 1:
        return Kernel(torch.clone)
    if count == 2:
        return writing(function, 2, inplace=(0, 1))
    return Kernel(lambda *tensors: reduce(function, tensors))


def clip(site: TorchSite) -> Kernel | None:
    """Clip: bounds are tensors of rank 0, on the host."""
    if site.dtype(0) not in FLOATS | _INTEGERS:
        return None

    def bounds(low: Any, high: Any) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if low is not None:
            limits["min"] = low.item()
        if high is not None:
            limits["max"] = high.item()
        return limits

    def function(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
        limits = bounds(low, high)
        return torch.clamp(x, **limits) if limits else x.clone()

    def into(x: Tensor, *others: Any) -> None:
        *limits, out = others
        given = bounds(*(*limits, None, None)[:2])
        if given:
            torch.clamp(x, **given, out=out)
        else:
            out.copy_(x)

    return Kernel(function, into, inplace=(0,), device=DeviceWork(host_inputs=(1, 2)))


def where(site: TorchSite) -> Kernel | None:
    """Where: elements of one of two tensors, by a condition."""
    if site.dtype(0) is not torch.bool or None in (site.dtype(1), site.dtype(2)):
        return None
    if site.dtype(1) is not site.dtype(2):
        return None
    return writing(torch.where, 3)


def cast_kernel(site: TorchSite) -> Kernel | None:
    """Cast and CastLike. From floats to short integers, where numbers that do not fit are common,
    torch and NumPy do not agree; to others, what comes of these depends on the processor."""
    source, target = site.dtype(0), site.result_dtype()
    if source is None or target is None or site.attrs.get("round_mode", "up") not in ("up", b"up"):
        return None
    if source in FLOATS and target in _INTEGERS - {torch.int32, torch.int64}:
        return None

    def function(x: Tensor, *_: Any) -> Tensor:
        return x.to(target, copy=True)

    def into(x: Tensor, *others: Tensor) -> None:
        others[-1].copy_(x)

    return Kernel(function, into)


def shift(site: TorchSite) -> Kernel | None:
    """BitShift of signed integers by less than their bits is the same in torch and NumPy."""
    if site.dtype(0) is not torch.uint8 or site.dtype(1) is not torch.uint8:
        return None
    shifts = site.const(1)
    if shifts is None or shifts.max(initial=0) >= 8:
        return None
    left = site.attrs["direction"] in ("LEFT", b"LEFT")
    function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    return writing(function, 2, inplace=(0,))


def identity_kernel(site: TorchSite) -> Kernel | None:
    """Identity, and Dropout where nothing is dropped: the input itself."""
    if site.dtype(0) is None:
        return None
    if site.node.op.name == "Dropout":
        mode = site.const(2)
        if site.given(2) and (mode is None or mode.any()):
            return None
        if site.output(1) is not None:
            return None
    return Kernel(lambda x, *_: x, view=True)
