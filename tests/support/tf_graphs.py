"""GraphDefs for tests, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    AttrValue,
    FunctionDef,
    GraphDef,
    NodeDef,
    TensorProto,
)

NUMBERS = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "object": 7,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint32": 22,
    "uint64": 23,
    "float16": 19,
}


class Type(str):
    """The name of an element type, as an attribute."""


class Shape(tuple):
    """A shape, as an attribute; -1 is an unknown dim."""


class Func(str):
    """The name of a function, as an attribute."""


def tensor(value: Any) -> TensorProto:
    array = np.asarray(value)
    array = array.astype(object) if array.dtype.kind in "US" else array
    proto = TensorProto(dtype=NUMBERS[array.dtype.name])
    for dim in array.shape:
        proto.tensor_shape.dim.add(size=dim)
    if array.dtype == object:
        proto.string_val.extend(x.encode("utf-8", "surrogateescape") for x in array.reshape(-1))
    else:
        proto.tensor_content = array.tobytes()
    return proto


def attribute(value: Any) -> AttrValue:
    proto = AttrValue()
    if isinstance(value, Type):
        proto.type = NUMBERS.get(value, {"resource": 20, "variant": 21}.get(value, 0))
    elif isinstance(value, Shape):
        proto.shape.SetInParent()
        for dim in value:
            proto.shape.dim.add(size=dim)
    elif isinstance(value, Func):
        proto.func.name = value
    elif isinstance(value, np.ndarray | np.generic):
        proto.tensor.CopyFrom(tensor(value))
    elif isinstance(value, bool):
        proto.b = value
    elif isinstance(value, int):
        proto.i = value
    elif isinstance(value, float):
        proto.f = value
    elif isinstance(value, str):
        proto.s = value.encode()
    elif isinstance(value, list):
        proto.list.SetInParent()
        for each in value:
            one = attribute(each)
            kind = one.WhichOneof("value")
            if kind in ("shape", "func"):
                getattr(proto.list, kind).add().CopyFrom(getattr(one, kind))
            else:
                getattr(proto.list, kind).append(getattr(one, kind))
    else:
        raise TypeError(value)
    return proto


class Builder:
    """A GraphDef that grows by a node at a time; each call gives the node's name."""

    def __init__(self) -> None:
        self.proto = GraphDef()
        self.proto.versions.producer = 1000
        self.into: Any = self.proto.node

    def node(self, op: str, *inputs: str, name: str = "", **attrs: Any) -> str:
        name = name or f"n{len(self.into)}"
        proto = NodeDef(name=name, op=op, input=list(inputs))
        for key, value in attrs.items():
            proto.attr[key].CopyFrom(attribute(value))
        self.into.append(proto)
        return name

    def const(self, value: Any, name: str = "", *controls: str) -> str:
        array = np.asarray(value)
        array = array.astype(object) if array.dtype.kind in "US" else array
        dtype = Type(array.dtype.name)
        return self.node("Const", *controls, name=name, dtype=dtype, value=array)

    def placeholder(self, name: str, dtype: str, *dims: int) -> str:
        return self.node("Placeholder", name=name, dtype=Type(dtype), shape=Shape(dims))

    def function(
        self, name: str, inputs: dict[str, str], outputs: dict[str, str], returns: dict[str, str]
    ) -> FunctionDef:
        """A function whose nodes are to follow, until ``self.into`` is set back."""
        function = self.proto.library.function.add()
        function.signature.name = name
        for each, dtype in inputs.items():
            function.signature.input_arg.add(name=each, type=NUMBERS[dtype])
        for each, dtype in outputs.items():
            function.signature.output_arg.add(name=each, type=NUMBERS[dtype])
        function.ret.update(returns)
        self.into = function.node_def
        return function

    def main(self) -> None:
        """Further nodes are those of the graph itself."""
        self.into = self.proto.node

    def bytes(self) -> bytes:
        return self.proto.SerializeToString()


class Flow(Builder):
    """A graph of TensorFlow's primitives of control flow, over int32 where ``T`` says nothing."""

    def op(self, op: str, *inputs: str, name: str = "", T: str = "int32", **attrs: Any) -> str:
        return self.node(op, *inputs, name=name, T=Type(T), **attrs)

    def switch(self, data: str, predicate: str, name: str = "", T: str = "int32") -> str:
        return self.op("Switch", data, predicate, name=name, T=T)

    def merge(self, *inputs: str, name: str = "", T: str = "int32") -> str:
        """Control inputs are the last ones, and begin with ^."""
        data = sum(not each.startswith("^") for each in inputs)
        return self.op("Merge", *inputs, name=name, T=T, N=data)

    def enter(
        self,
        value: str,
        *controls: str,
        frame: str,
        name: str = "",
        constant: bool = False,
        parallel: int = 10,
        T: str = "int32",
    ) -> str:
        return self.op(
            "Enter",
            value,
            *controls,
            name=name,
            T=T,
            frame_name=frame,
            is_constant=constant,
            parallel_iterations=parallel,
        )

    def carry(
        self,
        loop: str,
        variable: str,
        start: str,
        step: Callable[[str], str],
        *,
        frame: str = "",
        predicate: str = "",
        parallel: int = 10,
        T: str = "int32",
    ) -> str:
        """One more variable of a loop; its Exit.

                 start ─> enter ─> merge ─> switch ─F─> exit
                                     ^        │ T
                                   next <─ step(body)

        The nodes are named "loop/variable/enter" and so on; the frame is that of ``loop`` unless it
        is named, and the predicate "loop/cond".
        """
        at = f"{loop}/{variable}"
        frame = frame or loop
        entered = self.enter(start, frame=frame, name=f"{at}/enter", parallel=parallel, T=T)
        merged = self.merge(entered, f"{at}/next", name=f"{at}/merge", T=T)
        switched = self.switch(merged, predicate or f"{loop}/cond", f"{at}/switch", T)
        body = self.op("Identity", f"{switched}:1", name=f"{at}/body", T=T)
        self.op("NextIteration", step(body), name=f"{at}/next", T=T)
        return self.op("Exit", switched, name=f"{at}/exit", T=T)

    def loop(
        self,
        name: str,
        start: str,
        limit: str,
        *,
        frame: str = "",
        loop_cond: bool = True,
        parallel: int = 10,
    ) -> str:
        """``while i < limit: i += 1``; the Exit of i.

        Beside those of the variable "i" it has the nodes limit, less, cond, and in the body one
        and add.
        """
        bound = self.enter(
            limit, frame=frame or name, name=f"{name}/limit", constant=True, parallel=parallel
        )
        less = self.op("Less", f"{name}/i/merge", bound, name=f"{name}/less")
        cond = self.node("LoopCond", less, name=f"{name}/cond") if loop_cond else less

        def step(i: str) -> str:
            one = self.const(np.int32(1), f"{name}/one", f"^{i}")
            return self.op("AddV2", i, one, name=f"{name}/add")

        return self.carry(name, "i", start, step, frame=frame, predicate=cond, parallel=parallel)
