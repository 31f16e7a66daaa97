"""Rules of tables, of sparse embeddings, of words, and of random numbers.

The handle of a table is a value that no node computes: the rules know which table it stands for,
and what CALL_ONCE has put in it, so that a lookup reads the keys and values themselves.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import INT64
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.ir.graph import Value
from penstock.ops.registry import TFLITE


@operator_rule("HASHTABLE", integers=True)
def hashtable(c: OperatorConversion) -> None:
    (handle,) = c.outputs
    assert handle is not None
    c.context.handles[handle] = c.option("table_id", "HashtableOptions")


def _number(c: OperatorConversion, handle: Value) -> int:
    if handle not in c.context.handles:
        raise InexpressibleError("its table is not made in the same subgraph")
    return c.context.handles[handle]


@operator_rule("HASHTABLE_IMPORT", outputs=0, integers=True)
def hashtable_import(c: OperatorConversion) -> None:
    """A table is filled once: later imports change nothing."""
    handle, keys, values = c.take(3)
    if keys.const is None or values.const is None:
        raise InexpressibleError("it fills a table with what is not constant")
    c.context.tables.setdefault(_number(c, handle), (keys, values))


def _contents(c: OperatorConversion, handle: Value) -> tuple[Value, Value]:
    contents = c.context.tables.get(_number(c, handle))
    if contents is None:
        raise NodeError("reads a table that nothing has filled before")
    return contents


@operator_rule("HASHTABLE_FIND", integers=True)
def hashtable_find(c: OperatorConversion) -> None:
    handle, query, other = c.take(3)
    c.emit_final("HashtableFind", [*_contents(c, handle), query, other], domain=TFLITE)


@operator_rule("HASHTABLE_SIZE", integers=True)
def hashtable_size(c: OperatorConversion) -> None:
    (handle,) = c.take(1)
    keys = _contents(c, handle)[0].const
    assert keys is not None
    c.emit_final("Identity", [[len(set(keys.reshape(-1).tolist()))]])


# Random numbers: of LiteRT's distributions, but not its draws.


def _seed(c: OperatorConversion) -> dict[str, float]:
    """By seeds other than 0, sessions draw the same numbers."""
    one, other = c.option("seed", "RandomOptions"), c.option("seed2", "RandomOptions")
    # A seed of ONNX is a float32, which holds whole numbers up to there.
    return {"seed": float((31 * one + other) % 2**24)} if one or other else {}


@operator_rule("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL")
def random(c: OperatorConversion) -> None:
    c.take(1)
    zeros = c.emit("ConstantOfShape", [c.vector(0)], value=np.zeros(1, np.float32))
    op = "RandomUniformLike" if c.op == "RANDOM_UNIFORM" else "RandomNormalLike"
    c.emit_final(op, [zeros], _seed(c))


@operator_rule("MULTINOMIAL")
def multinomial(c: OperatorConversion) -> None:
    x, _ = c.take(2)
    (count,) = c.constant_integers(1, "number of samples")
    # ONNX's numbers of int64 and int32.
    number = 7 if c.output_dtypes[0] == INT64 else 6
    attrs = {"sample_size": count, "dtype": number, **_seed(c)}
    c.emit_final("Multinomial", [c.cast(x, "float32")], attrs)
