"""Draw the cases of ``bench.kernels`` from models: ``python -m bench.kernels --collect MODEL...``.

Each model is run once on ONNX Runtime, which returns all values, so that their shapes are known
where shape inference ends as well: behind shapes that are computed. Nodes in bodies of loops and
branches are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tests.models.fetch import real_models

from bench.kernel_cases import CONVOLUTIONS, HELPERS, OPERATIONS, PRODUCTS, Case, compact

MOST_BYTES = 64 << 20  # of all tensors of a case
MOST_KEPT = 16  # elements of whole numbers that may be axes or sizes, and so are kept
_KEPT = {"roi", "scales", "min", "max", "sequence_lens"}
_DTYPES = {np.dtype(name) for name in ("float32", "uint8", "int8", "int32", "int64")}
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
# Later versions of these operations changed what they mean; of the others all up to this one mean
# the same.
_CHANGED = {"Softmax", "LogSoftmax", "BatchNormalization", "Resize", "Upsample", "Clip", "Gelu"}
OPSET = 17
_ONES, _ZEROS = {"strides", "dilations"}, {"pads", "output_padding"}
FREE_DIM = 1  # where a model leaves a dim of an input open
# Heads, positions, and the features of a head: Swin's windows at two depths, BERT, ViT, Whisper.
ATTENTION = [
    (192, 49, 32), (48, 49, 32), (12, 16, 64), (12, 49, 64), (12, 128, 64), (12, 197, 64),
    (12, 256, 64), (12, 512, 64), (6, 1500, 64),
]  # fmt: skip


def collect(paths: Iterable[Path]) -> list[Case]:
    """The cases of models, each with the number of nodes that are like it."""
    counts: Counter[Case] = Counter()
    for path in paths:
        try:
            found = [*cases_of(onnx.load(path), known_feeds(path))]
        except Exception as error:  # what exporters write is not always a model
            print(f"{path} is left out: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        print(f"{path}: {len(found)} operations, {len({*found})} different", flush=True)
        counts.update(found)
    return [replace(case, count=count) for case, count in counts.items()]


def known_feeds(path: Path) -> dict[str, np.ndarray] | None:
    """The inputs of a model that tests fetch, wherever its file lies."""
    for model in real_models():
        if path.as_posix().endswith(model.file) and model.package in path.as_posix():
            return model.feeds()
    return None


def attention(heads: int, n: int, width: int) -> Case:
    """softmax(q k / c + mask) v, which is a few nodes in models and one kernel here."""
    shape = f"{heads}, {n}, {width}"
    return Case(
        OPSET,
        compact(
            f"""g (float[{shape}] q, float[{heads}, {width}, {n}] k, float[{shape}] v,
            float[1, {n}, {n}] m) => (float[{shape}] y) <float c = {{ {width**0.5:.6g} }}> {{
            a = MatMul(q, k) b = Div(a, c) s = Add(b, m) p = Softmax <axis = -1> (s)
            y = MatMul(p, v) }}"""
        ),
    )


def cases_of(model: onnx.ModelProto, feeds: dict[str, np.ndarray] | None = None) -> Iterator[Case]:
    """A case for each node that is one of ``OPERATIONS``, on these inputs, or on random ones."""
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    for node in model.graph.node:
        node.name = ""
    arrays = _values(model, feeds or _feeds(model))
    constant = _constants(model.graph)
    writers = {name: node for node in model.graph.node for name in node.output}
    readers = Counter(name for node in model.graph.node for name in node.input)
    for node in model.graph.node:
        if node.op_type not in OPERATIONS or node.domain not in ("", "ai.onnx"):
            continue
        before = [
            writer
            for name in dict.fromkeys(node.input)
            if (writer := writers.get(name)) and _belongs(writer, node, arrays)
        ]
        nodes = [*before, node]
        if any(n.op_type == "DequantizeLinear" for n in before):
            # The only reader rounds the result, so that a kernel may write codes.
            (written,) = node.output[:1]
            after = [n for n in model.graph.node if written in n.input]
            if readers[written] == 1 and after[0].op_type == "QuantizeLinear":
                nodes.append(after[0])
        case = _case(nodes, opset, arrays, constant)
        if case is not None:
            yield case


def _belongs(writer: onnx.NodeProto, node: onnx.NodeProto, arrays: dict[str, np.ndarray]) -> bool:
    """Whether the node that computes an input is part of the case."""
    if writer.op_type == "DequantizeLinear" and node.op_type in CONVOLUTIONS | PRODUCTS:
        return all(name in arrays for name in writer.input if name)
    return writer.op_type == "Transpose" and node.op_type == "MatMul"


def _values(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All tensors of the graph by name, constants included."""
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    names = list(dict.fromkeys(name for n in model.graph.node for name in n.output if name))
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(
        whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = dict(zip(names, session.run(names, feeds), strict=True))
    values |= {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | feeds
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def _feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random inputs, with ``FREE_DIM`` for dims that the model leaves open."""
    held = {tensor.name for tensor in model.graph.initializer}
    rng, feeds = np.random.default_rng(0), {}
    for port in model.graph.input:
        if port.name in held:
            continue
        type_ = port.type.tensor_type
        dims = [dim.dim_value or FREE_DIM for dim in type_.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(type_.elem_type)
        if dtype.kind == "f":
            feeds[port.name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[port.name] = np.ones(dims, dtype)
    return feeds


def _constants(graph: onnx.GraphProto) -> set[str]:
    """The names of values that do not depend on inputs."""
    constant = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in _RANDOM and all(name in constant for name in node.input if name):
            constant |= {*node.output}
    return constant


class _Graph:
    """The graph of a case that grows node by node. ``names`` are the new names of values."""

    def __init__(self, opset: int, arrays: dict[str, np.ndarray], constant: set[str]) -> None:
        self.opset, self.arrays, self.constant = opset, arrays, constant
        self.names: dict[str, str] = {"": ""}
        self.graph = onnx.GraphProto(name="g")

    def add(self, node: onnx.NodeProto) -> None:
        schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        copy = self.graph.node.add(op_type=node.op_type)
        inputs = node.input
        roles = [p.name for p in schema.inputs]
        roles += roles[-1:] * (len(inputs) - len(roles))  # of operations of any number of inputs
        copy.input.extend(self._name(*pair) for pair in zip(inputs, roles, strict=False))
        outs = [p.name for p in schema.outputs]
        copy.output.extend(self._named(*pair) for pair in zip(node.output, outs, strict=False))
        known = node.op_type not in ("MaxPool", "AveragePool")
        attrs = sorted(node.attribute, key=lambda a: a.name)
        copy.attribute.extend(a for a in attrs if not _is_default(a, schema, known))

    def _named(self, name: str, role: str) -> str:
        if name not in self.names:
            taken, number = {*self.names.values()}, 0
            while (new := f"{role}{number or ''}") in taken:
                number += 1
            self.names[name] = new
        return self.names[name]

    def _name(self, name: str, role: str) -> str:
        """The new name of an input, which is declared here if no node computes it."""
        if name in self.names:
            return self.names[name]
        new, array = self._named(name, role), self.arrays[name]
        whole = array.dtype == np.int64 and array.size <= MOST_KEPT
        if whole or role in _KEPT:
            self.graph.initializer.append(numpy_helper.from_array(array, new))
            return new
        place = self.graph.value_info if name in self.constant else self.graph.input
        place.append(_info(new, array))
        return new

    def finish(self, last: onnx.NodeProto) -> None:
        outputs = [name for name in last.output if name and name in self.arrays]
        self.graph.output.extend(_info(self.names[name], self.arrays[name]) for name in outputs)


def _info(name: str, array: np.ndarray) -> Any:
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, dtype, array.shape)


def _is_default(attribute: onnx.AttributeProto, schema: Any, with_weights: bool) -> bool:
    """Whether a node means the same without this attribute."""
    name, value = attribute.name, helper.get_attribute_value(attribute)
    if name == "kernel_shape":
        return with_weights  # whose dims tell it
    if name in _ONES | _ZEROS:
        return {*value} <= {int(name in _ONES)}
    declared = schema.attributes.get(name)
    if declared is None or not declared.default_value.type:
        return declared is None
    return value == helper.get_attribute_value(declared.default_value)


def _case(
    nodes: list[onnx.NodeProto], opset: int, arrays: dict[str, np.ndarray], constant: set[str]
) -> Case | None:
    """The case of these nodes; None if it is of other dtypes, empty, too large, or constant."""
    names = {name for node in nodes for name in (*node.input, *node.output) if name}
    main = next(n for n in nodes if n.op_type not in HELPERS)
    used = [arrays[name] for name in names if name in arrays]
    if main.output[0] in constant or len(used) < len(names) or not _is_fit(used):
        return None
    new = _Graph(opset, arrays, constant)
    for node in nodes:
        new.add(node)
    new.finish(nodes[-1])
    if not new.graph.input:
        return None
    changed = any(n.op_type in _CHANGED or n.op_type.startswith("Reduce") for n in nodes)
    version = onnx.defs.get_schema(main.op_type, opset, "").since_version
    meant = max(version if len(nodes) == 1 else opset, 7) if changed else OPSET
    return Case(meant, compact(onnx.printer.to_text(new.graph)))


def _is_fit(arrays: list[np.ndarray]) -> bool:
    return (
        all(array.dtype in _DTYPES and array.size for array in arrays)
        and sum(array.nbytes for array in arrays) <= MOST_BYTES
    )


def model_paths(names: Iterable[str]) -> list[Path]:
    """The files of these names; of folders, all models in them."""
    paths = [Path(name) for name in names]
    return sorted({f for p in paths for f in (p.rglob("*.onnx") if p.is_dir() else [p])})
