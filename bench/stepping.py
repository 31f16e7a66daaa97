"""Frames a second of many streams of models whose state is fed back, one thread each.

``python -m bench.stepping [--seconds 2] [--turns 5]`` writes bench/stepping.md: through one
``penstock.Stepper``, and by runs of one session that each thread makes for its own stream, of
Penstock and of ONNX Runtime. Each engine runs in a process of its own, turn by turn.

``python -m bench.stepping ENGINE MODEL CLIENTS SECONDS`` prints the figures of one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from bench.clients import throughput
from bench.exports import CACHE
from bench.run import machine
from bench.trial import ROOT

PAGE = Path(__file__).parent / "stepping.md"
CLIENTS = (1, 8, 32)
BANDS, UNITS = 80, 512
WARM_UP = 0.2  # of the seconds
SILERO = ROOT / ".cache/packages/silero-vad-6.2.3/silero_vad/data/silero_vad_op18_ifless.onnx"
MODELS = ("lstm", "silero-vad")
ENGINES = ("stepper", "session", "onnxruntime")
Feeds = dict[str, np.ndarray]
Step = Callable[[Feeds], Mapping[str, np.ndarray]]


def path_of(model: str) -> Path:
    """The file of a model; of the LSTM one that is written if it is not there yet."""
    if model == "silero-vad":
        return SILERO
    path = CACHE / "lstm-stream.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(lstm(), path)
    return path


def lstm() -> onnx.ModelProto:
    """Two layers of LSTM and a dense one, as torch exports them for one frame."""
    state = f"float[1, batch, {UNITS}]"
    text = f"""<ir_version: 9, opset_import: ["": 17]>
    g (float[batch, {BANDS}] input, {state} h0, {state} c0, {state} h1, {state} c1) =>
        (float[batch, 40] output, {state} h0_out, {state} c0_out, {state} h1_out, {state} c1_out)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{
        x = Unsqueeze (input, zero)
        y0, h0_out, c0_out = LSTM <hidden_size = {UNITS}> (x, w0, r0, , , h0, c0)
        z = Squeeze (y0, one)
        y1, h1_out, c1_out = LSTM <hidden_size = {UNITS}> (z, w1, r1, , , h1, c1)
        last = Squeeze (h1_out, zero) output = MatMul (last, head) }}"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {"head": (UNITS, 40)}
    for i, width in enumerate((BANDS, UNITS)):
        shapes |= {f"w{i}": (1, 4 * UNITS, width), f"r{i}": (1, 4 * UNITS, UNITS)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32) / np.float32(UNITS**0.5)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def frame_of(model: str) -> Feeds:
    rng = np.random.default_rng(threading.get_ident() % 1000)
    if model == "silero-vad":  # 32 ms, and the last 4 of the frame before
        audio = 0.1 * rng.standard_normal((1, 576)).astype(np.float32)
        return {"input": audio, "sr": np.array(16_000)}
    return {"input": rng.standard_normal((1, BANDS)).astype(np.float32)}


def stream_of(run: Step, states: Mapping[str, str], zeros: Feeds) -> Step:
    """Steps of one stream by runs of a session that others run, too."""
    arrays = {**zeros}

    def step(frame: Feeds) -> Mapping[str, np.ndarray]:
        outputs = run({**frame, **arrays})
        arrays.update({name: outputs[y] for name, y in states.items()})
        return outputs

    return step


def streams(engine: str, model: str) -> Callable[[], Step]:
    """What begins a stream."""
    path = str(path_of(model))
    if engine == "stepper":
        import penstock as ps

        stepper = ps.Stepper(path)
        return lambda: stepper.sequence().step
    states = {"state": "stateN"} if model == "silero-vad" else {}
    if model == "lstm":
        states = {f"{c}{i}": f"{c}{i}_out" for c in "hc" for i in (0, 1)}
    dims = (2, 1, 128) if model == "silero-vad" else (1, 1, UNITS)
    zeros = {name: np.zeros(dims, np.float32) for name in states}
    if engine == "session":
        import penstock as ps

        session = ps.compile(path)
        return lambda: stream_of(session.run, states, zeros)
    import onnxruntime

    runtime = onnxruntime.InferenceSession(path)
    names = [port.name for port in runtime.get_outputs()]

    def run(feeds: Feeds) -> Feeds:
        return dict(zip(names, runtime.run(None, feeds), strict=True))

    return lambda: stream_of(run, states, zeros)


def frames_a_second(engine: str, model: str, clients: int, seconds: float) -> float:
    """Frames a second of all clients together, each a thread that steps a stream of its own."""
    begin, own = streams(engine, model), threading.local()

    def step() -> None:
        if not hasattr(own, "step"):
            own.step, own.frame = begin(), frame_of(model)
        own.step(own.frame)

    throughput(step, clients, WARM_UP * seconds)
    return throughput(step, clients, seconds)


def measured(*arguments: object) -> float:
    """The figure of a process of its own."""
    command = [sys.executable, "-m", "bench.stepping", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    figure: float = json.loads(done.stdout.splitlines()[-1])
    return figure


def page(figures: Mapping[tuple[str, int, str], list[float]], seconds: float) -> str:
    """The page of the benchmark."""
    turns = len(next(iter(figures.values())))
    lines = [
        "# Steps of many streams",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.stepping`: {machine()}.",
        f"Frames a second of all clients, the best of {turns} turns of {seconds:g} seconds. Each",
        "client is a thread that steps a stream of its own, frame by frame: through one",
        "`penstock.Stepper`, or by runs of a session that all share.",
        "",
        f"`lstm` has two layers of {UNITS} units and one frame of {BANDS} numbers; `silero-vad` is",
        "6.2.3, with 32 ms a frame.",
        "",
        "| model | clients | Stepper | session.run | ONNX Runtime | to session | to ONNX Runtime |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, clients in dict.fromkeys([(m, n) for m, n, _ in figures]):
        # Others compute on the machine, too: of each engine the turn that they disturbed least.
        own, *others = [max(figures[model, clients, e]) for e in ENGINES]
        cells = [f"{value:,.0f}" for value in (own, *others)]
        cells += [f"{own / value:.2f}" for value in others]
        lines.append(f"| {model} | {clients} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in ENGINES:
        engine, model, clients, seconds = arguments
        figure = frames_a_second(engine, model, int(clients), float(seconds))
        sys.stdout.write(json.dumps(figure) + "\n")
        return
    options: Any = ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    figures: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(given.turns):
        for model in [name for name in MODELS if path_of(name).exists()]:
            for clients in CLIENTS:
                for engine in ENGINES:
                    figure = measured(engine, model, clients, given.seconds)
                    figures.setdefault((model, clients, engine), []).append(figure)
                    print(model, clients, engine, f"{figure:,.0f}", flush=True)
    PAGE.write_text(page(figures, given.seconds))


if __name__ == "__main__":
    main()
