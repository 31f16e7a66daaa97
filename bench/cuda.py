"""The torch backend beside torch itself: ``python -m bench.cuda``.

Networks of ``bench.exports`` (the extra ``bench-full`` has what makes them) run on the current CUDA
device, or on torch's CPU device where there is none or with ``--device cpu``. Each engine is in a
process of its own, and they take turns: Penstock on the exported ONNX file, torch in inference
mode, and, on CUDA, ``torch.compile(mode="reduce-overhead")``. Inputs and outputs are NumPy arrays
for all of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.exports import RECIPES, export, make

MODELS = ("resnet50", "mobilenetv2", "bert-base", "gpt2-small")
TURNS = 3
SECONDS = 2.0

Run = Callable[[], np.ndarray]


def penstock_run(model: str, device: str, dtype: str) -> Run:
    """Penstock with the torch backend."""
    import penstock as ps
    from penstock.backends.torch.backend import TorchBackend

    session = ps.compile(export(model), backends=[TorchBackend(device, dtype)], executor="linear")
    feeds = RECIPES[model].feeds()
    return lambda: next(iter(session.run(feeds).values()))


def torch_run(model: str, device: str, dtype: str, compiled: bool) -> Run:
    """The module that the file was exported from."""
    import torch

    module: Any = make(model).to(device, getattr(torch, dtype))
    if compiled:
        module = torch.compile(module, mode="reduce-overhead")
    feeds = [torch.from_numpy(x) for x in RECIPES[model].feeds().values()]

    def run() -> np.ndarray:
        with torch.inference_mode():
            inputs = [
                x.to(device, getattr(torch, dtype) if x.is_floating_point() else None)
                for x in feeds
            ]
            return module(*inputs).float().cpu().numpy()

    return run


def measure(engine: str, model: str, device: str, dtype: str) -> float:
    """The median of the seconds of a run, in this process."""
    if engine == "penstock":
        run = penstock_run(model, device, dtype)
    else:
        run = torch_run(model, device, dtype, engine == "compiled")
    for _ in range(3):
        run()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def in_process(engine: str, model: str, device: str, dtype: str) -> float:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "bench.cuda", "--one", engine, "--device", device]
    command += ["--dtype", dtype, model]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"of {', '.join(RECIPES)}")
    parser.add_argument(
        "--device", help="of torch; by default CUDA, or the CPU where there is none"
    )
    parser.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    parser.add_argument("--one", help="measure this engine alone, in this process")
    options = parser.parse_args()
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.one:
        print(measure(options.one, options.models[0], device, options.dtype))
        return
    name = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    print(f"torch {torch.__version__}, {name}, {options.dtype}; milliseconds of a run\n")
    engines = ["penstock", "eager", *(["compiled"] if device != "cpu" else [])]
    print(f"| model | {' | '.join(engines)} | penstock / eager |")
    print("|" + "---|" * (len(engines) + 2))
    for model in options.models:
        export(model)
        turns = [
            [in_process(engine, model, device, options.dtype) for engine in engines]
            for _ in range(TURNS)
        ]
        best = [min(times) for times in zip(*turns, strict=True)]
        cells = [f"{seconds * 1e3:.2f}" for seconds in best]
        print(f"| {model} | {' | '.join(cells)} | {best[0] / best[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
