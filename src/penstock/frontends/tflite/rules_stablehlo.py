"""Rules of the operators of StableHLO that LiteRT runs, and of those that came with them."""

from __future__ import annotations

import numpy as np

from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.ir.graph import Value
from penstock.ops.registry import TFLITE

_REDUCTIONS = ("", "add", "multiply", "minimum", "maximum", "and", "or")
"""as REDUCE_WINDOW numbers them"""
_SCATTER = """
    update_window_dims inserted_window_dims scatter_dims_to_operand_dims index_vector_dim
"""


@operator_rule("STABLEHLO_AND")
def both(c: OperatorConversion) -> None:
    dtype = c.dtype(0)
    c.emit_final("And" if dtype is not None and dtype.kind == "b" else "BitwiseAnd", c.take(2))


@operator_rule("STABLEHLO_PAD", moves=True)
def pad(c: OperatorConversion) -> None:
    x, value = c.take(2)
    steps = c.constant([1 + step for step in c.option("interior_padding")])
    attrs = {"low": c.option("edge_padding_low"), "high": c.option("edge_padding_high")}
    c.emit_final("Spread", [x, steps, value], attrs, domain=TFLITE)


@operator_rule("REDUCE_WINDOW")
def reduce_window(c: OperatorConversion) -> None:
    number = c.option("reduce_function")
    if not 0 < number < len(_REDUCTIONS):
        raise InexpressibleError(f"it reduces windows by function {number}")
    c.emit_final("ReduceWindow", c.take(5), {"reduction": _REDUCTIONS[number]}, domain=TFLITE)


@operator_rule("STABLEHLO_REDUCE_WINDOW")
def reduce_spread_window(c: OperatorConversion) -> None:
    x, initial = c.take(2)
    rank = len(c.option("window_dimensions"))
    numbers = [
        c.constant(c.option(name) or [1] * rank)
        for name in ("window_dimensions", "window_strides", "window_dilations")
    ]
    borders = np.reshape(c.option("padding") or [0] * 2 * rank, (-1, 2))
    steps = c.option("base_dilations") or [1] * rank
    if borders.any() or max(steps, default=1) > 1:
        attrs = {"low": borders[:, 0].tolist(), "high": borders[:, 1].tolist()}
        x = c.emit("Spread", [x, steps, initial], attrs, domain=TFLITE)
    attrs = {"reduction": _region(c, "body_subgraph_index")}
    c.emit_final("ReduceWindow", [x, initial, *numbers], attrs, domain=TFLITE)


@operator_rule("STABLEHLO_SCATTER")
def scatter(c: OperatorConversion) -> None:
    attrs = {name: c.option(name) for name in _SCATTER.split()}
    attrs["reduction"] = _region(c, "update_computation_subgraph_index")
    c.emit_final("SliceScatter", c.take(3), attrs, domain=TFLITE)


def _region(c: OperatorConversion, option: str) -> str:
    """The operation that a subgraph of two scalars consists of, "" if it gives the second one."""
    scalars = [Value(c.fresh("scalar")), Value(c.fresh("scalar"))]
    scope = c.context.use(c.scope, c.option(option), scalars, f"{c.name}/")
    names = {"Add": "add", "Mul": "multiply", "Min": "minimum", "Max": "maximum", "And": "and"}
    ops = [names.get(node.op.name) for node in scope.nodes]
    if not ops and scope.outputs == scalars[1:]:
        return ""
    if len(ops) != 1 or ops[0] is None or len(scope.outputs) != 1:
        raise InexpressibleError("its subgraph is no single addition, product, extreme or And")
    return ops[0]


@operator_rule("STABLEHLO_RNG_BIT_GENERATOR", outputs=2)
def random_bits(c: OperatorConversion) -> None:
    dtype, _, tensor = c.context.declared(c.scope, c.operator.outputs[1])
    shape = tensor.shape
    if dtype is None or dtype.name not in ("int32", "int64", "uint32", "uint64"):
        raise InexpressibleError(f"it gives {dtype}")
    attrs = {"algorithm": c.option("algorithm"), "dtype": dtype.name, "shape": list(shape)}
    c.emit_final("RngBitGenerator", c.take(1), attrs, domain=TFLITE)
