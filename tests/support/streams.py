"""Small models whose state is of fixed size, and ONNX Runtime's answers for each stream alone."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import penstock as ps
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON

WIDTH, UNITS, PAST = 6, 8, 3
LSTM = f"""g (float[{{b}}, {WIDTH}] frame, float[1, {{b}}, {UNITS}] h0, float[1, {{b}}, {UNITS}] c0)
    => (float[{{b}}, {UNITS}] output, float[1, {{b}}, {UNITS}] hn, float[1, {{b}}, {UNITS}] cn)
    <int64[1] zero = {{{{0}}}}> {{{{
    x = Unsqueeze (frame, zero) y, hn, cn = LSTM <hidden_size = {UNITS}> (x, w, r, , , h0, c0)
    output = Squeeze (hn, zero) }}}}"""
# A number for all, past frames, and a count of frames by which they are weighted.
BUFFER = f"""g (float[n, {WIDTH}, t] audio, float rate, float[n, {WIDTH}, {PAST}] audio_cache_in,
    int64[n] length) => (float[n, t] y, float[n, {WIDTH}, {PAST}] audio_cache_out, int64[n] new_length)
    <int64 one = {{1}}, int64[1] last = {{2}}, int64[1] begin = {{-{PAST}}}, int64[1] end = {{9999}},
    int64[1] middle = {{1}}> {{
    all = Concat <axis = 2> (audio_cache_in, audio)
    audio_cache_out = Slice (all, begin, end, last) new_length = Add (length, one)
    f = Cast <to = 1> (length) g = Unsqueeze (f, middle)
    sums = ReduceSum <keepdims = 0> (audio_cache_in, last) m = ReduceMean <axes = [1], keepdims = 0> (audio)
    s = ReduceSum <keepdims = 1> (sums, middle) u = Mul (s, rate) v = Add (u, g) z = Add (m, v)
    y = Tanh (z) }}"""
# Each sample is told from the mean of all.
DEPENDENT = f"""g (float[b, {WIDTH}] frame, float[b, {WIDTH}] state) =>
    (float[b, {WIDTH}] y, float[b, {WIDTH}] state_out) <int64[1] zero = {{0}}> {{
    m = ReduceMean <axes = [0]> (frame) y = Sub (frame, m) s = Add (state, frame)
    state_out = Tanh (s) }}"""


@cache
def stream_model(kind: str) -> onnx.ModelProto:
    """A model: ``lstm``, one with ``unnamed`` dims, one of one ``static`` sample; ``buffer``,
    ``dependent``."""
    if kind == "buffer":
        return model_from_text(BUFFER, opset=17)
    if kind == "dependent":
        return model_from_text(DEPENDENT, opset=17)
    model = model_from_text(LSTM.format(b={"unnamed": "?", "static": "1"}.get(kind, "batch")))
    rng = np.random.default_rng(5)
    shapes = {"w": (1, 4 * UNITS, WIDTH), "r": (1, 4 * UNITS, UNITS)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) / 2 for n, s in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in arrays.items())
    return model


@cache
def _runtime(kind: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(stream_model(kind).SerializeToString())


class HeldSteps:
    """Holds the steps of a stepper until ``opened`` is set; ``reached``: the first one has begun."""

    def __init__(self, stepper: ps.Stepper) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        runner = stepper._engine.runner
        run = runner.run

        def held(pieces: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(SOON)
            return run(pieces)

        runner.run = held  # type: ignore[method-assign]


class StreamAlone:
    """A stream that ONNX Runtime steps by itself; ``state`` as of a stepper."""

    def __init__(self, kind: str, state: dict[str, str], **initial: np.ndarray) -> None:
        self._runtime, self._state = _runtime(kind), state
        self._arrays = {}
        for port in self._runtime.get_inputs():
            if port.name in state:
                dims = [n if isinstance(n, int) else 1 for n in port.shape]
                dtype = np.int64 if "int64" in port.type else np.float32
                self._arrays[port.name] = initial.get(port.name, np.zeros(dims, dtype))

    def step(self, frame: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of the next frame that are no states."""
        names = [port.name for port in self._runtime.get_outputs()]
        values = self._runtime.run(None, {**frame, **self._arrays})
        outputs = dict(zip(names, values, strict=True))
        self._arrays = {name: outputs.pop(y) for name, y in self._state.items()}
        return outputs
