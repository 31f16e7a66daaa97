"""Sets of operations that share a property which passes ask for."""

from __future__ import annotations

UNARY = frozenset(
    """
    Abs Clip Elu Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg QuickGelu Reciprocal Relu
    Round Selu Sigmoid Softplus Sqrt Swish Tanh
    """.split()  # noqa: SIM905 - names are easier to read without quotes
)
BINARY = frozenset({"Add", "Div", "Max", "Min", "Mul", "PRelu", "Pow", "Sub"})
