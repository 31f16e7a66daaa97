"""Elementwise kernels: single functions of torch, and formulas of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce

import torch
from torch import Tensor

from penstock.backends.torch.site import FLOATS, INDICES, INTEGERS, NUMBERS, TorchSite
from penstock.core.records import replace
from penstock.core.types import RunValue
from penstock.ir.kernel import DeviceWork, Kernel, LayoutHints

_nn = torch._C._nn
"""activations that take ``out=``"""
BOOLEANS = frozenset({torch.bool})


def writing(
    function: Callable[..., RunValue], count: int, *, inplace: tuple[int, ...] = ()
) -> Kernel:
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


def _by_name(
    functions: Mapping[frozenset[torch.dtype], Mapping[str, Callable[..., Tensor]]],
) -> dict[str, tuple[Callable[..., Tensor], frozenset[torch.dtype]]]:
    """Functions by the names of operations, with the elements that they take."""
    return {
        name: (function, elements)
        for elements, named in functions.items()
        for name, function in named.items()
    }


# Of one operand.


_REAL = (
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp"),
    *("Floor", "Log", "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan"),
    "Tanh",
)
"""functions of real numbers, whose names in torch are the same in lower case"""
# By the elements that they take.
_PLAIN: Mapping[frozenset[torch.dtype], Mapping[str, Callable[..., Tensor]]] = {
    BOOLEANS: {"Not": torch.logical_not},
    INTEGERS: {"BitwiseNot": torch.bitwise_not},
    NUMBERS: {
        "Abs": torch.abs,
        "Neg": torch.neg,
        # torch.relu has no parameter `out`.
        "Relu": lambda x, out=None: torch.clamp_min(x, 0, out=out),
    },
    FLOATS: {
        **{name: getattr(torch, name.lower()) for name in _REAL},
        "HardSwish": _nn.hardswish,
        "Mish": _nn.mish,
        # torch's own is linear from a threshold on; the logarithm of a sum is exact everywhere.
        "Softplus": lambda x, out=None: torch.logaddexp(x, torch.zeros_like(x), out=out),
    },
}
_UNARY = _by_name(_PLAIN)


def _hard_sigmoid(site: TorchSite) -> Callable[..., Tensor]:
    slope, offset = site.attrs.get("alpha", 0.2), site.attrs.get("beta", 0.5)

    def hard_sigmoid(x: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.mul(x, slope, out=out)
        return out.add_(offset).clamp_(0, 1)

    return hard_sigmoid


def _selu(site: TorchSite) -> Callable[..., Tensor]:
    alpha = site.attrs.get("alpha", 1.6732632423543772)
    return partial(_nn.elu, alpha=alpha, scale=site.attrs.get("gamma", 1.0507009873554805))


# Activations with parameters, as functions with ``out=``, and those that are several functions.
_PARAMETRIC: Mapping[str, Callable[[TorchSite], Callable[..., Tensor]]] = {
    "Elu": lambda site: partial(_nn.elu, alpha=site.attrs.get("alpha", 1.0)),
    "Gelu": lambda site: partial(_nn.gelu, approximate=site.text("approximate", "none")),
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda site: partial(_nn.leaky_relu, negative_slope=site.attrs.get("alpha", 0.01)),
    "Selu": _selu,
}
_FORMULAS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "Celu": torch.celu,
    "Softsign": lambda x, _: x / x.abs().add_(1),
    "Swish": lambda x, alpha: torch.mul(x, alpha).sigmoid_().mul_(x),
    "ThresholdedRelu": lambda x, alpha: torch.where(x > alpha, x, torch.zeros_like(x)),
    "ZeroNaN": lambda x, _: torch.where(torch.isnan(x), torch.zeros_like(x), x),
}


def unary(site: TorchSite) -> Kernel | None:
    """Functions and activations of one operand."""
    name, dtype = site.node.op.name, site.dtype(0)
    if name in _UNARY:
        function, elements = _UNARY[name]
        return writing(function, 1, inplace=(0,)) if dtype in elements else None
    if dtype not in FLOATS:
        return None
    if name == "IsNaN":
        return Kernel(torch.isnan)
    if name == "IsInf":
        return _is_inf(site)
    if name in _PARAMETRIC:
        kernel = writing(_PARAMETRIC[name](site), 1, inplace=(0,))
        # torch 2.13 writes wrong numbers to strided memory here.
        return replace(kernel, layout=LayoutHints(contiguous=True)) if name == "Gelu" else kernel
    alpha, formula = site.attrs.get("alpha", 1.0), _FORMULAS[name]
    if name == "Swish" and alpha == 1:
        return writing(_nn.silu, 1, inplace=(0,))
    return Kernel(lambda x: formula(x, alpha))


UNARY = ("IsInf", "IsNaN", *_UNARY, *_PARAMETRIC, *_FORMULAS)


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

_ARITHMETIC: Mapping[frozenset[torch.dtype], Mapping[str, Callable[..., Tensor]]] = {
    BOOLEANS: {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor},
    INTEGERS: {
        "BitwiseAnd": torch.bitwise_and,
        "BitwiseOr": torch.bitwise_or,
        "BitwiseXor": torch.bitwise_xor,
    },
    NUMBERS: {"Add": torch.add, "Mul": torch.mul, "Sub": torch.sub},
    FLOATS: {"Pow": torch.pow},
}
_BINARY = _by_name(_ARITHMETIC)
_COMPARISONS: Mapping[str, Callable[..., Tensor]] = {
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
    if dtype is not site.dtype(1):
        return None
    if name in _COMPARISONS:
        return writing(_COMPARISONS[name], 2)
    if name in _BINARY:
        function, elements = _BINARY[name]
        return writing(function, 2, inplace=(0, 1)) if dtype in elements else None
    if name == "PRelu":
        own = dtype in FLOATS
        # torch's own takes slopes for channels only, while ONNX's broadcast.
        return Kernel(lambda x, slope: torch.where(x < 0, x * slope, x)) if own else None
    if dtype is torch.bool or (dtype not in FLOATS and not _divisor_is_safe(site)):
        return None
    if name == "Mod":
        divide = torch.fmod if site.attrs.get("fmod") else torch.remainder
    else:
        divide = torch.div if dtype in FLOATS else partial(torch.div, rounding_mode="trunc")
    return writing(divide, 2, inplace=(0, 1))


BINARY = (*_BINARY, *_COMPARISONS, "Div", "Mod", "PRelu")


_VARIADIC: Mapping[str, Callable[..., RunValue]] = {
    "Max": torch.maximum,
    "Mean": torch.add,
    "Min": torch.minimum,
    "Sum": torch.add,
}
VARIADIC = tuple(_VARIADIC)


def variadic(site: TorchSite) -> Kernel | None:
    """One function of any number of operands, two at a time; their mean."""
    name, count = site.node.op.name, len(site.node.inputs)
    if len({site.dtype(i) for i in range(count)}) != 1:
        return None
    function = _VARIADIC[name]
    if name == "Mean":
        own = site.dtype(0) in FLOATS
        return Kernel(lambda *x: reduce(torch.add, x) / count) if own else None
    if count == 1:
        # Not the operand itself: its memory may be reused before that of the result.
        return Kernel(torch.clone)
    if count == 2:
        return writing(function, 2, inplace=(0, 1))
    return Kernel(lambda *tensors: reduce(function, tensors))


def clip(site: TorchSite) -> Kernel | None:
    """Clip: bounds are tensors of rank 0, on the host."""

    def function(
        x: Tensor, low: RunValue = None, high: RunValue = None, *, out: Tensor | None = None
    ) -> Tensor:
        if low is None and high is None:
            return x.clone() if out is None else out.copy_(x)
        least, most = (None if bound is None else bound.item() for bound in (low, high))
        return torch.clamp(x, least, most, out=out)

    return replace(writing(function, 3, inplace=(0,)), device=DeviceWork(host_inputs=(1, 2)))


def where(site: TorchSite) -> Kernel | None:
    """Where: elements of one of two tensors, by a condition."""
    if site.dtype(1) is None or site.dtype(1) is not site.dtype(2):
        return None
    return writing(torch.where, 3)


def cast_kernel(site: TorchSite) -> Kernel | None:
    """Cast and CastLike. From floats to short integers, where numbers that do not fit are common,
    torch and NumPy do not agree; to others, what comes of these depends on the processor."""
    source, target = site.dtype(0), site.result_dtype()
    if target is None or site.text("round_mode", "up") != "up":
        return None
    if source in FLOATS and target in INTEGERS - INDICES:
        return None

    def function(x: Tensor, *_: RunValue) -> Tensor:
        return x.to(target, copy=True)

    def into(x: Tensor, *others: Tensor) -> None:
        others[-1].copy_(x)

    return Kernel(function, into)


def shift(site: TorchSite) -> Kernel | None:
    """BitShift of signed integers by less than their bits is the same in torch and NumPy."""
    shifts = site.const(1)
    if site.dtype(1) is not torch.uint8 or shifts is None or shifts.max(initial=0) >= 8:
        return None
    left = site.text("direction") == "LEFT"
    function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    return writing(function, 2, inplace=(0,))


def identity_kernel(site: TorchSite) -> Kernel | None:
    """Identity, and Dropout where nothing is dropped: the input itself."""
    if site.node.op.name == "Dropout":
        mode = site.const(2)
        if site.given(2) and (mode is None or mode.any()):
            return None
        if site.output(1) is not None:
            return None
    return Kernel(lambda x, *_: x, view=True)
