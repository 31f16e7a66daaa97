"""Steps of optimizers (domain ai.onnx.preview.training), written as arithmetic.

A node updates any number of tensors. Its inputs are the learning rate, the number of the step, the
tensors, their gradients, and each state of theirs (``x0 x1 .. g0 g1 .. h0 h1 ..``); its outputs are
the new tensors and states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.frontends.common.diagnostics import NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value
from penstock.ops.common.dtypes import FLOAT64


class _Update:
    """The update of one tensor ``x`` with the gradient ``g``. Factors of all elements are computed
    in float64."""

    def __init__(self, old: NodeUpgrade, x: Value, g: Value) -> None:
        self.old, self.emit, self.attrs, self.x = old, old.emit, old.attrs, x
        scalars = [old.emit("Reshape", [old.input(i), old.constant([])]) for i in (0, 1)]
        self.rate, self.number = (old.cast(scalar, "float64") for scalar in scalars)
        scaled = old.emit("Mul", [self.like(old.attrs["norm_coefficient"]), x])
        self.gradient = old.emit("Add", [scaled, g])
        """with that of the square norm"""

    def wide(self, number: float) -> Value:
        return self.old.constant(number, FLOAT64)

    def like(self, number: float) -> Value:
        return self.old.like(number, self.x)

    def mixed(self, a: float, x: Value, b: float, y: Value) -> Value:
        """``a x + b y``"""
        terms = [self.emit("Mul", [self.like(f), v]) for f, v in ((a, x), (b, y))]
        return self.emit("Add", terms)

    def moved(self, rate: Value, direction: Value, squares: Value | None = None) -> Value:
        """``x`` after a step in a direction, whose elements are divided by the roots of squares."""
        step = self.emit("Mul", [self.emit("CastLike", [rate, self.x]), direction])
        if squares is not None:
            root = self.emit("Sqrt", [squares])
            epsilon = self.like(self.attrs["epsilon"])
            step = self.emit("Div", [step, self.emit("Add", [root, epsilon])])
        return self.emit("Sub", [self.x, step])

    def after_the_first(self, value: Value, first: Value) -> Value:
        """One of two factors: steps are counted from 0."""
        later = self.emit("Greater", [self.number, self.wide(0)])
        return self.emit("Where", [later, value, first])


def _adagrad(update: _Update, h: Value) -> list[Value]:
    """J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12, 2011."""
    emit, wide = update.emit, update.wide
    squares = emit("Add", [h, emit("Mul", [update.gradient, update.gradient])])
    decay = emit("Mul", [update.number, wide(update.attrs["decay_factor"])])
    rate = emit("Div", [update.rate, emit("Add", [wide(1), decay])])
    return [update.moved(rate, update.gradient, squares), squares]


def _adam(update: _Update, v: Value, h: Value) -> list[Value]:
    """D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015."""
    emit, wide, attrs = update.emit, update.wide, update.attrs
    alpha, beta = attrs["alpha"], attrs["beta"]
    mean = update.mixed(alpha, v, 1 - alpha, update.gradient)
    square = emit("Mul", [update.gradient, update.gradient])
    squares = update.mixed(beta, h, 1 - beta, square)
    of_v, of_h = (
        emit("Sub", [wide(1), emit("Pow", [wide(factor), update.number])])
        for factor in (alpha, beta)
    )
    unbiased = emit("Div", [emit("Mul", [update.rate, emit("Sqrt", [of_h])]), of_v])
    x = update.moved(update.after_the_first(unbiased, update.rate), mean, squares)
    x = emit("Mul", [update.like(1 - attrs["norm_coefficient_post"]), x])
    return [x, mean, squares]


def _momentum(update: _Update, v: Value) -> list[Value]:
    """The first step takes all of the gradient, whatever ``beta`` is."""
    emit, attrs = update.emit, update.attrs
    beta = update.after_the_first(update.wide(attrs["beta"]), update.wide(1))
    new = emit("Mul", [emit("CastLike", [beta, update.x]), update.gradient])
    alpha = update.like(attrs["alpha"])
    velocity = emit("Add", [emit("Mul", [alpha, v]), new])
    if attrs["mode"] not in ("standard", "nesterov"):
        raise NodeError(f"has mode {attrs['mode']!r}; it is standard or nesterov")
    ahead = emit("Add", [update.gradient, emit("Mul", [alpha, velocity])])
    direction = ahead if attrs["mode"] == "nesterov" else velocity
    return [update.moved(update.rate, direction), velocity]


_STEPS: Mapping[str, tuple[int, Callable[..., list[Value]]]] = {
    "Adagrad": (1, _adagrad),
    "Adam": (2, _adam),
    "Momentum": (1, _momentum),
}
"""The number of states of a tensor, and what gives its new value and theirs"""


def optimizer(old: NodeUpgrade) -> None:
    """Write out one step."""
    states, step = _STEPS[old.op]
    arrays = [old.input(i) for i in range(2, len(old.inputs))]
    count, rest = divmod(len(arrays), states + 2)
    if rest or not count or len(old.outputs) != count * (states + 1):
        raise NodeError(
            f"has {len(arrays)} arrays and {len(old.outputs)} outputs; it takes {states + 2} "
            f"arrays for each tensor that is updated, and has {states + 1} outputs for it"
        )
    groups = [arrays[i::count] for i in range(count)]
    updates = [step(_Update(old, x, g), *others) for x, g, *others in groups]
    results = [value for values in zip(*updates, strict=True) for value in values]
    pairs = [(value, y) for value, y in zip(results, old.outputs, strict=True) if y is not None]
    for value, y in pairs[:-1]:
        old.give([y], "Identity", [value])
    for value, y in pairs[-1:]:
        old.become("Identity", [value], outputs=[y])
