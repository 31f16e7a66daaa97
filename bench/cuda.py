"""The torch backend beside torch itself: ``python -m bench.cuda``.

Networks of ``bench.exports`` (the extra ``bench-full`` has what makes them) run on the current CUDA
device, or on torch's CPU device where there is none or with ``--device cpu``. Each engine is in a
process of its own, and they take turns: Penstock on the exported ONNX file, torch in inference
mode, and, on CUDA, ``torch.compile(mode="reduce-overhead")``. Inputs and outputs are tensors of the
device on CUDA, where a run ends when the device has; NumPy arrays on the CPU.

On CUDA the element type is float16 unless ``--dtype`` says otherwise, and two more figures follow:
the time that the host takes for a run whose steps are captured, and two equal branches on two
streams beside one. The targets are in the last column.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.exports import BATCHES, RECIPES, export, make, recipe_of

MODELS = ("resnet50", "resnet50-32", "mobilenetv2", "bert-base", "gpt2-small")
ON_CPU = ("resnet50", "mobilenetv2", "bert-base", "gpt2-small")
TURNS = 3
SECONDS = 2.0
BRANCH = 24
"""products in each of two equal branches"""

Run = Callable[[], Any]


def penstock_run(model: str, device: str, dtype: str) -> Run:
    """Penstock with the torch backend."""
    import torch

    import penstock as ps
    from penstock.backends.torch.backend import TorchBackend

    session = ps.compile(export(model), backends=[TorchBackend(device, dtype)], executor="linear")
    feeds: dict[str, Any] = dict(recipe_of(model).feeds())
    if device == "cpu":
        return lambda: next(iter(session.run(feeds).values()))
    feeds = {name: torch.from_numpy(x).to(device) for name, x in feeds.items()}
    return lambda: session.run(feeds, returns="torch")


def torch_run(model: str, device: str, dtype: str, compiled: bool) -> Run:
    """The module that the file was exported from."""
    import torch

    module: Any = make(model).to(device, getattr(torch, dtype))
    if compiled:
        module = torch.compile(module, mode="reduce-overhead")
    given = [torch.from_numpy(x) for x in recipe_of(model).feeds().values()]

    def inputs() -> list[Any]:
        floats = getattr(torch, dtype)
        return [x.to(device, floats if x.is_floating_point() else None) for x in given]

    on_device = inputs()

    def run() -> Any:
        with torch.inference_mode():
            if device == "cpu":
                return module(*inputs()).float().numpy()
            return module(*on_device)

    return run


def measure(engine: str, model: str, device: str, dtype: str) -> float:
    """The median of the seconds of a run, in this process."""
    if engine == "penstock":
        run = penstock_run(model, device, dtype)
    elif engine in ("host", "one stream", "two streams"):
        run = {"host": small_run, "one stream": one_stream, "two streams": two_streams}[engine](
            device
        )
    else:
        run = torch_run(model, device, dtype, engine == "compiled")
    return median_of(run, device, wait=engine != "host")


def median_of(run: Run, device: str, wait: bool) -> float:
    """The median of the seconds of a run; unless ``wait``, of the host's part alone."""
    end: Run = int if device == "cpu" else synchronized(device)
    for _ in range(5):
        run()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS or len(times) < 5:
        end()
        start = time.perf_counter()
        run()
        if wait:
            end()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronized(device: str) -> Run:
    import torch

    return lambda: torch.cuda.synchronize(device)


# On CUDA alone.


def small_run(device: str) -> Run:
    """A run of which nothing but the launch of a graph is left to the host."""
    import torch

    session = _branches(device, "linear")
    feeds = {"x": torch.zeros(64, 64, device=device)}
    return lambda: session.run(feeds, returns="torch")


def one_stream(device: str) -> Run:
    return _on_streams(device, 1)


def two_streams(device: str) -> Run:
    return _on_streams(device, 2)


def _on_streams(device: str, streams: int) -> Run:
    import torch

    session = _branches(device, "streams", {"max_streams": streams, "capture": False})
    feeds = {"x": torch.zeros(64, 64, device=device)}
    return lambda: session.run(feeds, returns="torch")


def _branches(device: str, executor: str, expert: Mapping[str, Any] | None = None) -> Any:
    """Two equal chains of small products, whose results are added."""
    import penstock as ps
    from penstock.backends.torch.backend import TorchBackend
    from penstock.build import GraphBuilder

    b = GraphBuilder()
    x = b.input("x", np.float32, [64, 64])
    weights = [b.constant(np.full((64, 64), 1 / 64 + k, np.float32)) for k in range(2)]
    ends = []
    for weight in weights:
        value = x
        for _ in range(BRANCH):
            value = b.op("MatMul", value, weight)
        ends.append(value)
    b.output("y", ends[0] + ends[1])
    options = ps.ExpertOptions(**(expert or {}))
    backend = TorchBackend(device)
    return ps.compile(b.model(), backends=[backend], executor=executor, expert=options)


def in_process(engine: str, model: str, device: str, dtype: str) -> float:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "bench.cuda", "--one", engine, "--device", device]
    command += ["--dtype", dtype, model]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def best_of(engines: list[str], model: str, device: str, dtype: str) -> list[float]:
    """The best median of each engine, in turns."""
    turns = [[in_process(e, model, device, dtype) for e in engines] for _ in range(TURNS)]
    return [min(times) for times in zip(*turns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join([*RECIPES, *BATCHES])}")
    parser.add_argument(
        "--device", help="of torch; by default CUDA, or the CPU where there is none"
    )
    parser.add_argument("--dtype", help="float32, float16 or bfloat16")
    parser.add_argument("--one", help="measure this engine alone, in this process")
    options = parser.parse_args()
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device == "cpu"
    dtype = options.dtype or ("float32" if on_cpu else "float16")
    if options.one:
        print(measure(options.one, options.models[0], device, dtype))
        return
    name = "CPU" if on_cpu else torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {name}, {dtype}; milliseconds of a run\n")
    engines = ["penstock", "eager", *([] if on_cpu else ["compiled"])]
    goal = "1.1 x eager" if on_cpu else "1.0 x compiled"
    print(f"| model | {' | '.join(engines)} | penstock / {engines[-1]} | at most |")
    print("|" + "---|" * (len(engines) + 3))
    for model in options.models or (ON_CPU if on_cpu else MODELS):
        export(model)
        best = best_of(engines, model, device, dtype)
        cells = [f"{seconds * 1e3:.2f}" for seconds in best]
        print(f"| {model} | {' | '.join(cells)} | {best[0] / best[-1]:.2f} | {goal} |", flush=True)
    if not on_cpu:
        (host,) = best_of(["host"], "", device, dtype)
        one, two = best_of(["one stream", "two streams"], "", device, dtype)
        print(f"\nhost time of a captured run: {host * 1e6:.1f} us (at most 30)")
        print(f"two branches on two streams: {two / one:.2f} of one stream (at most 0.6)")


if __name__ == "__main__":
    main()
