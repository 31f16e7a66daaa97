"""The details that LiteRT gives of the tensors of a file, read from its tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.core.types import STRING
from penstock.frontends.common.model_files import open_path
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.flatbuffer import FlatTable
from penstock.frontends.tflite.tensors import dtype_of

Details = dict[str, Any]


class SubgraphTensors(NamedTuple):
    """The tensors of one subgraph by number, and the numbers of its inputs and outputs."""

    tensors: Mapping[int, Details]
    inputs: Sequence[int]
    outputs: Sequence[int]


class SignatureTensors(NamedTuple):
    """A signature: its subgraph, and the numbers of its tensors by name."""

    subgraph: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


class FileTensors(NamedTuple):
    """All subgraphs and signatures of a file."""

    subgraphs: Sequence[SubgraphTensors]
    signatures: Mapping[str, SignatureTensors]


def read_tensors(source: str | os.PathLike[str] | bytes) -> FileTensors:
    """The tensors that a file, or its bytes, declares. Raises ``InvalidModel``."""
    path = None if isinstance(source, bytes) else os.fspath(source)
    opened = source if isinstance(source, bytes) else partial(open_path, os.fspath(source))
    with opened_model(opened, path or "the model") as (table, _):
        subgraphs = [
            SubgraphTensors(
                {i: _details(i, tensor) for i, tensor in enumerate(graph.tensors)},
                [*graph.inputs],
                [*graph.outputs],
            )
            for graph in table.subgraphs
        ]
        signatures = {
            entry.signature_key: SignatureTensors(
                entry.subgraph_index,
                {x.name: x.tensor_index for x in entry.inputs},
                {x.name: x.tensor_index for x in entry.outputs},
            )
            for entry in table.signature_defs
        }
    return FileTensors(subgraphs, signatures)


def _details(index: int, tensor: FlatTable) -> Details:
    dtype, shape = dtype_of(tensor), np.array(tensor.shape, np.int32)
    signature = np.array(tensor.shape_signature, np.int32)
    parameters = tensor.quantization
    scales = np.array([] if parameters is None else parameters.scale, np.float32)
    points = np.array([] if parameters is None else parameters.zero_point, np.int32)
    points = np.resize(points if points.size else [0], scales.size).astype(np.int32)
    axis = 0 if parameters is None else parameters.quantized_dimension
    single = (float(scales[0]), int(points[0])) if scales.size == 1 else (0.0, 0)
    return {
        "name": tensor.name,
        "index": index,
        "shape": shape,
        "shape_signature": signature if signature.size == shape.size else shape,
        "dtype": np.bytes_ if dtype is None or dtype == STRING else dtype.type,
        "quantization": single,
        "quantization_parameters": {
            "scales": scales,
            "zero_points": points,
            "quantized_dimension": axis,
            "block_size": 0,
        },
        "sparsity_parameters": {},
    }
