"""Attention of short sequences as one kernel, beside its steps: ``python -m bench.attention``.

Microseconds of a run on one thread, the least of several turns: softmax(q k / c + mask) v of dense
float32 tensors, as Penstock places it, and with the backends onednn and numpy alone. These take
products and the softmax in steps, and longer heads in blocks of rows.

``ONEDNN_MAX_CPU_ISA=AVX2 PENSTOCK_NATIVE=x86-64-v3`` measures processors without AVX-512.
"""

from __future__ import annotations

import time

import numpy as np
import onnx.parser

import penstock as ps

# Heads, positions, and the features of a head: Swin's windows at two depths, BERT and ViT.
CASES = {
    "Swin, 64 windows, 3 heads": (192, 49, 32),
    "Swin, 4 windows, 12 heads": (48, 49, 32),
    "BERT, 16 positions": (12, 16, 64),
    "BERT, 49 positions": (12, 49, 64),
    "BERT, 128 positions": (12, 128, 64),
    "ViT, 197 positions": (12, 197, 64),
    "BERT, 256 positions": (12, 256, 64),
}
TURNS, SECONDS = 5, 0.3


def least(session: ps.Session, feeds: dict[str, np.ndarray]) -> float:
    """Seconds of the fastest run."""
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    rng = np.random.default_rng(0)
    print("| attention | as placed, us | onednn and numpy, us | ratio |\n|---|---|---|---|")
    for name, (heads, n, width) in CASES.items():
        model = onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["" : 19]>
            g (float[{heads}, {n}, {width}] q, float[{heads}, {width}, {n}] k,
               float[{heads}, {n}, {width}] v, float[1, {n}, {n}] m)
            => (float[{heads}, {n}, {width}] y) <float c = {{ {width**0.5} }}> {{
                a = MatMul(q, k) b = Div(a, c) s = Add(b, m)
                p = Softmax <axis = -1> (s) y = MatMul(p, v) }}"""
        )
        feeds = {
            port.name: rng.normal(
                size=[dim.dim_value for dim in port.type.tensor_type.shape.dim]
            ).astype(np.float32)
            for port in model.graph.input
        }
        sessions = [
            ps.compile(model, threads=1),
            ps.compile(model, threads=1, backends=["onednn", "numpy"]),
        ]
        turns = [[least(session, feeds) for session in sessions] for _ in range(TURNS)]
        placed, steps = np.min(turns, 0)
        print(f"| {name} | {placed * 1e6:.0f} | {steps * 1e6:.0f} | {placed / steps:.2f} |")


if __name__ == "__main__":
    main()
