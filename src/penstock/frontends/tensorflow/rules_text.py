"""Rules of operations on text, and of tables.

A table is a constant, since the nodes that fill it are evaluated when the model is read
(``tables``). Lookup nodes get its keys and values; nodes that fill it do nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import STRING, find_dtype
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tensorflow.conversion import Conversion, listed, rule
from penstock.frontends.tensorflow.tables import FILLING, TABLES
from penstock.ops.registry import TENSORFLOW, TFLITE


def _text(c: Conversion, index: int) -> str | None:
    """Return input ``index`` if it is a constant string, else None."""
    array = c.input_constant(index)
    return None if array is None or array.dtype != STRING or array.ndim else str(array.item())


@rule("RegexReplace", "StaticRegexReplace")
def regex_replace(c: Conversion) -> None:
    kept = {"replace_global": c.attrs["replace_global"]}
    if c.op == "StaticRegexReplace":
        given = {key: c.attrs.get(key) for key in ("pattern", "rewrite")}
    else:
        given = {"pattern": _text(c, 1), "rewrite": _text(c, 2)}
    if None in given.values():
        c.emit_final("RegexReplace", attrs=kept, domain=TENSORFLOW)
    else:
        c.emit_final("RegexReplace", c.inputs[:1], {**given, **kept}, domain=TENSORFLOW)


@rule("RegexFullMatch", "StaticRegexFullMatch")
def regex_full_match(c: Conversion) -> None:
    pattern = _text(c, 1) if c.op == "RegexFullMatch" else c.attrs["pattern"]
    if pattern is None:
        raise InexpressibleError(
            "its pattern is not a constant; export the model with a constant one"
        )
    c.emit_final("RegexFullMatch", c.inputs[:1], {"pattern": pattern})


@rule("ParseExample", "ParseExampleV2")
def parse_example(c: Conversion) -> None:
    """Keys are constants: lists of them, or in the older operation one input for each."""
    if c.op == "ParseExample":
        counts = len(c.attrs["sparse_types"]), len(c.attrs["Tdense"])
        arrays = [c.input_constant(i) for i in range(2, 2 + sum(counts))]
        names = [None if key is None else key.reshape(1) for key in arrays]
        given, defaults = [names[: counts[0]], names[counts[0] :], []], c.inputs[2 + sum(counts) :]
    else:
        given, defaults = [[c.input_constant(i)] for i in (2, 3, 4)], c.inputs[5:]
    if any(key is None for keys in given for key in keys):
        raise InexpressibleError("its keys are not constants; export the model with constant ones")
    keys = [[str(key) for part in parts for key in part.tolist()] for parts in given]  # type: ignore[union-attr]
    shapes = [listed(shape) for shape in c.attrs["dense_shapes"]]
    if any(shape is None or -1 in shape[1:] for shape in shapes):
        raise InexpressibleError(f"its dense_shapes {shapes} are unknown behind the first dim")
    attrs = {
        **dict(zip(("sparse_keys", "dense_keys", "ragged_keys"), keys, strict=True)),
        **{name: c.attrs[name] for name in ("sparse_types", "Tdense")},
        **{name: c.attrs.get(name, []) for name in ("ragged_value_types", "ragged_split_types")},
        "dense_dims": [dim for shape in shapes for dim in shape],
        "dense_ranks": [len(shape) for shape in shapes],
    }
    c.emit_final("ParseExample", [c.inputs[0], *defaults], attrs, domain=TENSORFLOW)


@rule("Print")
def print_(c: Conversion) -> None:
    """Of the first version, which prints its message and data, and gives its input."""
    x, *data = c.inputs
    attrs = {"template": c.attrs["message"] + "\0" * len(data), "placeholder": "\0"}
    attrs["summarize"] = c.attrs["summarize"]
    text = c.emit("StringFormat", data, attrs, domain=TENSORFLOW)
    printing = {"output_stream": "stderr", "end": "\n", "first_n": c.attrs["first_n"]}
    node = c.append("PrintV2", TENSORFLOW, [text], [], printing, f"{c.stem}#print")
    c.emit_final("Identity", [x]).control_inputs.append(node)


# Sound.


@rule("AudioSpectrogram", "Mfcc")
def spectrogram(c: Conversion) -> None:
    c.emit_final(c.op, attrs=c.attrs, domain=TFLITE)


# Tables.


@rule(*TABLES)
def hash_table(c: Conversion) -> None:
    """The handle, whose contents are never read, is the name of the table."""
    name = np.array(c.attrs["shared_name"] or c.own_name, STRING)
    c.emit_final("Const", [], {"value": name}, domain=TENSORFLOW)


def _contents(c: Conversion) -> tuple[np.ndarray, np.ndarray]:
    contents = c.context.tables.contents(c.inputs[0])
    if contents is None:
        raise InexpressibleError(
            "the contents of its table are not known before a run: it is filled from values that "
            "are not constant, from a file that is missing from the model, or not at all; export a "
            "SavedModel with an initializer that fills it"
        )
    return contents


@rule(*FILLING)
def fill_table(c: Conversion) -> None:
    _contents(c)
    c.emit_final("NoOp", [], domain=TENSORFLOW)


@rule("LookupTableFind", "LookupTableFindV2")
def find(c: Conversion) -> None:
    keys, values = _contents(c)
    for array, name in ((keys, "Tin"), (values, "Tout")):
        if array.dtype != find_dtype(c.attrs[name]):
            raise NodeError(f"has {name} {c.attrs[name]}, but its table has {array.dtype}")
    if (rank := c.rank(2)) is not None and rank:
        raise NodeError(f"has a default of rank {rank}, which must be a scalar")
    table = [c.constant(x, x.dtype) for x in (keys, values)]
    c.emit_final("HashtableFind", [*table, *c.inputs[1:]], domain=TFLITE)


@rule("LookupTableSize", "LookupTableSizeV2")
def table_size(c: Conversion) -> None:
    keys, _ = _contents(c)
    c.emit_final("Const", [], {"value": np.array(len(keys), np.int64)}, domain=TENSORFLOW)
