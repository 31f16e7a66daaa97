"""Operators one by one, beside LiteRT: models of one operator, and what LiteRT gives for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.tensors import _NAMES
from tests.support.tflite_models import model, subgraph

litert = pytest.importorskip("ai_edge_litert.interpreter")

TABLES = {name.lower(): name for name in schema().tables.entries}
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Op:
    """One operator. ``inputs`` that are arrays are fed, those in a list are constants, those that
    are tuples the shapes of variables. Options that are bytes are those of a custom operator."""

    name: str
    inputs: tuple[Any, ...]
    options: Any = field(default_factory=dict)
    outputs: tuple[str, ...] = ("float32",)
    version: int = 1
    kind: str = ""

    def __str__(self) -> str:
        options = self.options if isinstance(self.options, dict) else {}
        return f"{self.name} {' '.join(f'{k}={v}' for k, v in options.items())}"

    @property
    def file(self) -> bytes:
        kind = self.kind or TABLES.get(f"{self.name.replace('_', '').lower()}options")
        options = None if kind is None else (kind, self.options)
        options = self.options if isinstance(self.options, bytes) else options
        names = [f"x{i}" if x is not None else None for i, x in enumerate(self.inputs)]
        pairs = [(n, x) for n, x in zip(names, self.inputs, strict=True) if n is not None]
        numbers = {name: number for number, name in _NAMES.items()}
        ys = [f"y{i}" for i in range(len(self.outputs))]
        graph = subgraph(
            {n: (x.dtype.name, x.shape) for n, x in pairs if isinstance(x, np.ndarray)},
            [(self.name, names, ys, options)],
            ys,
            {n: x[0] for n, x in pairs if isinstance(x, list)},
            **{n: {"shape": x, "is_variable": True} for n, x in pairs if isinstance(x, tuple)},
            **{y: {"type": numbers[dtype]} for y, dtype in zip(ys, self.outputs, strict=True)},
        )
        return model([graph], versions={self.name: self.version})

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray)}


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def scalar(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(value, dtype)


IMAGE = f(2, 7, 6, 4)
WINDOW = {"padding": 0, "stride_w": 2, "stride_h": 1, "filter_width": 3, "filter_height": 2}


def spoken(name: str, *inputs: Any, **options: Any) -> Op:
    """One of LiteRT's own custom operators."""
    return Op(f"CUSTOM:{name}", inputs, bytes(flexbuffers.Dumps(options)))


def by_litert(
    file: bytes,
    feeds: dict[str, np.ndarray],
    runs: int = 1,
    resolver: str = "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
) -> list[np.ndarray]:
    resolver = litert.OpResolverType[resolver]
    interpreter = litert.Interpreter(model_content=file, experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    for _ in range(runs):
        interpreter.invoke()
    return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]


def check_operator(op: Op) -> None:
    """That NumPy's kernels, and those that the costs choose, give what LiteRT gives."""
    wanted = by_litert(op.file, op.feeds)
    for backends in (["numpy"], None):
        got = ps.compile(op.file, backends=backends).run(op.feeds)
        for value, want in zip(got.values(), wanted, strict=True):
            assert (value.dtype, value.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)
