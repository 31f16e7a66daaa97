"""Steps of optimizers (domain ai.onnx.preview.training), written as arithmetic.

A node updates any number of tensors. Its inputs are the learning rate, the index of the step, the
tensors, their gradients, and each of their states (``x0 x1 .. g0 g1 .. h0 h1 ..``); its outputs are
the new tensors and states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.frontends.common.diagnostics import NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value
from penstock.ir.op import Attrs


class _Term:
    """A value in an expression. Numbers combined with it get its element type."""

    def __init__(self, old: NodeUpgrade, value: Value) -> None:
        self.old, self.value = old, value

    def like(self, number: float) -> _Term:
        return _Term(self.old, self.old.like(number, self.value))

    def of(self, op: str, *others: _Term | float) -> _Term:
        """Return the result of an operation on this value and others."""
        terms = [x if isinstance(x, _Term) else self.like(x) for x in others]
        return _Term(self.old, self.old.emit(op, [self.value, *(term.value for term in terms)]))

    def __add__(self, other: _Term | float) -> _Term:
        return self.of("Add", other)

    def __sub__(self, other: _Term | float) -> _Term:
        return self.of("Sub", other)

    def __mul__(self, other: _Term | float) -> _Term:
        return self.of("Mul", other)

    def __truediv__(self, other: _Term | float) -> _Term:
        return self.of("Div", other)


Terms = list[_Term]


def _adagrad(attrs: Attrs, rate: _Term, number: _Term, x: _Term, g: _Term, h: _Term) -> Terms:
    """J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12, 2011."""
    squares = g * g + h
    rate = (rate / (number * attrs["decay_factor"] + 1)).of("CastLike", x)
    return [x - g * rate / (squares.of("Sqrt") + attrs["epsilon"]), squares]


def _adam(attrs: Attrs, rate: _Term, number: _Term, x: _Term, g: _Term, *states: _Term) -> Terms:
    """D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015."""
    (v, h), alpha, beta = states, attrs["alpha"], attrs["beta"]
    mean, squares = v * alpha + g * (1 - alpha), h * beta + g * g * (1 - beta)
    of_mean, of_squares = (
        number.like(1) - number.like(base).of("Pow", number) for base in (alpha, beta)
    )
    unbiased = rate * of_squares.of("Sqrt") / of_mean
    rate = number.of("Greater", 0).of("Where", unbiased, rate).of("CastLike", x)
    new = x - mean * rate / (squares.of("Sqrt") + attrs["epsilon"])
    return [new * (1 - attrs["norm_coefficient_post"]), mean, squares]


def _momentum(attrs: Attrs, rate: _Term, number: _Term, x: _Term, g: _Term, v: _Term) -> Terms:
    """The first step uses the whole gradient, whatever ``beta`` is."""
    if attrs["mode"] not in ("standard", "nesterov"):
        raise NodeError(f"has mode {attrs['mode']!r}; it is standard or nesterov")
    later = number.of("Greater", 0)
    beta = later.of("Where", number.like(attrs["beta"]), number.like(1)).of("CastLike", x)
    velocity = v * attrs["alpha"] + g * beta
    step = g + velocity * attrs["alpha"] if attrs["mode"] == "nesterov" else velocity
    return [x - step * rate.of("CastLike", x), velocity]


_STEPS: Mapping[str, tuple[int, Callable[..., Terms]]] = {
    "Adagrad": (1, _adagrad),
    "Adam": (2, _adam),
    "Momentum": (1, _momentum),
}
"""the number of states of a tensor, and the function that computes its new value and states, from
learning rate and step in float64 and the gradient including that of the square norm"""


def optimizer(old: NodeUpgrade) -> None:
    """Write out one step."""
    states, step = _STEPS[old.op]
    terms = [_Term(old, old.input(i)) for i in range(len(old.inputs))]
    scalars = [old.emit("Reshape", [term.value, old.constant([])]) for term in terms[:2]]
    factors = [_Term(old, old.cast(scalar, "float64")) for scalar in scalars]
    count, rest = divmod(len(terms) - 2, states + 2)
    if rest or not count or len(old.outputs) != count * (states + 1):
        raise NodeError(
            f"has {len(terms) - 2} arrays and {len(old.outputs)} outputs; it takes {states + 2} "
            f"arrays for each tensor that is updated, and has {states + 1} outputs for it"
        )
    updates = []
    for x, g, *others in (terms[2 + i :: count] for i in range(count)):
        gradient = x * old.attrs["norm_coefficient"] + g
        updates.append(step(old.attrs, *factors, x, gradient, *others))
    results = [term.value for terms in zip(*updates, strict=True) for term in terms]
    pairs = [(value, y) for value, y in zip(results, old.outputs, strict=True) if y is not None]
    for value, y in pairs[:-1]:
        old.give([y], "Identity", [value])
    for value, y in pairs[-1:]:
        old.become("Identity", [value], outputs=[y])
