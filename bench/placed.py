"""Attention and dense layers as placed, beside oneDNN and NumPy: ``python -m bench.placed``.

Microseconds of a run, the least of several turns, of dense float32 tensors: as Penstock places it,
and with the backends onednn and numpy alone, which take attention in steps. Attention is
softmax(q k / c + mask) v on one thread. Dense layers follow one another, up to 16, with different
weights, as in a network: those of wide ones are 38 MB.

``ONEDNN_MAX_CPU_ISA=AVX2 PENSTOCK_NATIVE=x86-64-v3`` measures processors without AVX-512.
"""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

import penstock as ps

# Heads, positions, and the features of a head: Swin's windows at two depths, BERT and ViT.
ATTENTION = {
    "Swin, 64 windows, 3 heads": (192, 49, 32),
    "Swin, 4 windows, 12 heads": (48, 49, 32),
    "BERT, 16 positions": (12, 16, 64),
    "BERT, 49 positions": (12, 49, 64),
    "BERT, 128 positions": (12, 128, 64),
    "ViT, 197 positions": (12, 197, 64),
    "BERT, 256 positions": (12, 256, 64),
    "BERT, 512 positions": (12, 512, 64),
    "whisper, 1500 positions": (6, 1500, 64),
}
# Rows, features, and those between two layers.
LAYERS = [
    *[(rows, 768, 3072) for rows in (1, 8, 16, 49, 128, 512)],
    (1500, 384, 1536),
    (3136, 96, 384),
    (1000, 40, 24),
]
WEIGHTS = 10_000_000  # of all layers
TURNS, SECONDS = 5, 0.3


def least(session: ps.Session, feeds: dict[str, np.ndarray]) -> float:
    """Seconds of the fastest run."""
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begin)
    return min(times)


def attention(heads: int, n: int, width: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 19]>
        g (float[{heads}, {n}, {width}] q, float[{heads}, {width}, {n}] k,
           float[{heads}, {n}, {width}] v, float[1, {n}, {n}] m)
        => (float[{heads}, {n}, {width}] y) <float c = {{ {width**0.5} }}> {{
            a = MatMul(q, k) b = Div(a, c) s = Add(b, m)
            p = Softmax <axis = -1> (s) y = MatMul(p, v) }}"""
    )


def layers(rows: int, features: int, hidden: int) -> onnx.ModelProto:
    """Pairs of dense layers, from ``features`` to ``hidden`` ones and back, with a bias each."""
    rng = np.random.default_rng(1)
    count = min(8, WEIGHTS // (2 * features * hidden))
    nodes, held, last = [], {}, "x0"
    for i in range(1, 2 * count + 1):
        shape = (features, hidden) if i % 2 else (hidden, features)
        held[f"w{i}"] = rng.normal(size=shape).astype(np.float32) / np.float32(shape[0] ** 0.5)
        held[f"b{i}"] = rng.normal(size=shape[1]).astype(np.float32)
        nodes.append(f"p{i} = MatMul({last}, w{i}) x{i} = Add(p{i}, b{i})")
        last = f"x{i}"
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 19]>
        g (float[{rows}, {features}] x0) => (float[{rows}, {features}] {last}) {{
            {" ".join(nodes)} }}"""
    )
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in held.items()]
    model.graph.initializer.extend(weights)
    return model


def compare(name: str, model: onnx.ModelProto, threads: int) -> None:
    rng = np.random.default_rng(0)
    feeds = {
        port.name: rng.normal(
            size=[dim.dim_value for dim in port.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for port in model.graph.input
    }
    sessions = [
        ps.compile(model, threads=threads),
        ps.compile(model, threads=threads, backends=["onednn", "numpy"]),
    ]
    turns = [[least(session, feeds) for session in sessions] for _ in range(TURNS)]
    placed, others = np.min(turns, 0) * 1e6
    print(f"| {name} | {threads} | {placed:.0f} | {others:.0f} | {placed / others:.2f} |")


def main() -> None:
    print("| | threads | as placed, us | onednn and numpy, us | ratio |\n|---|---|---|---|---|")
    for name, sizes in ATTENTION.items():
        compare(name, attention(*sizes), 1)
    for sizes in LAYERS:
        for threads in (1, 2):
            compare("{} rows, {} to {} features".format(*sizes), layers(*sizes), threads)


if __name__ == "__main__":
    main()
