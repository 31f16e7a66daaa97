"""TFLite models that keep a sum in a variable, and how LiteRT answers a stream of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ai_edge_litert import interpreter as litert

from tests.support.tflite_models import model, subgraph

_HANDLE = ("VarHandleOptions", {"container": "", "shared_name": "sum"})
_RESOURCE = {"type": 13}
_ADD, _ONCE = ("AddOptions", {}), ("CallOnceOptions", {"init_subgraph_index": 1})
X, FLAG = {"x": ("float32", [1, 3])}, {"flag": ("bool", [1])}
_READ = [("VAR_HANDLE", [], ["h"], _HANDLE), ("READ_VARIABLE", ["h"], ["old"], None)]
_SUM = [*_READ, ("ADD", ["old", "x"], ["new"], _ADD), ("ASSIGN_VARIABLE", ["h", "new"], [], None)]
_TANH = ("TANH", ["new"], ["y"], None)
_TEN = {"c": np.full((1, 3), 10, np.float32)}


def _first() -> dict[str, object]:
    nodes = [("VAR_HANDLE", [], ["h"], _HANDLE), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    return subgraph({}, nodes, [], _TEN, h=_RESOURCE)


def summing() -> bytes:
    """y = tanh of the sum of all x so far, and 10."""
    main = [("CALL_ONCE", [], [], _ONCE), *_SUM, _TANH]
    return model([subgraph(X, main, ["y"], h=_RESOURCE), _first()])


def branching() -> bytes:
    """The same where a flag is set; else x, and the sum stays."""
    branches = {"then_subgraph_index": 2, "else_subgraph_index": 3}
    choice = ("IF", ["flag", "x"], ["y"], ("IfOptions", branches))
    then = subgraph(X, [*_SUM, _TANH], ["y"], h=_RESOURCE)
    other = subgraph(X, [("ABS", ["x"], ["y"], None)], ["y"])
    main = subgraph({**FLAG, **X}, [("CALL_ONCE", [], [], _ONCE), choice], ["y"])
    return model([main, _first(), then, other])


def looping() -> bytes:
    """x is added three times by a loop."""
    loop = ("WhileOptions", {"cond_subgraph_index": 2, "body_subgraph_index": 3})
    main = [
        ("CALL_ONCE", [], [], _ONCE),
        ("WHILE", ["zero", "x"], ["n", "same"], loop),
        *_READ,
        ("TANH", ["old"], ["y"], None),
    ]
    number, one = {"i": ("int32", [])}, {"one": np.array(1, np.int32)}
    three = {"three": np.array(3, np.int32)}
    less = [("LESS", ["i", "three"], ["more"], None)]
    next_ = [*_SUM, ("ADD", ["i", "one"], ["j"], _ADD)]
    whole = {"type": 2}
    return model(
        [
            subgraph(X, main, ["y"], {"zero": np.array(0, np.int32)}, h=_RESOURCE, n=whole),
            _first(),
            subgraph({**number, **X}, less, ["more"], three, more={"type": 6}),
            subgraph({**number, **X}, next_, ["j", "x"], one, h=_RESOURCE, j=whole),
        ]
    )


MODELS = {"summing": summing, "branching": branching, "looping": looping}


def frames_of(name: str, seed: int, count: int) -> list[dict[str, np.ndarray]]:
    """The inputs of a stream."""
    rng = np.random.default_rng(seed)
    frames = [{"x": rng.standard_normal((1, 3)).astype(np.float32) * 4} for _ in range(count)]
    for frame in frames if name == "branching" else ():
        frame["flag"] = rng.integers(0, 2, 1).astype(bool)
    return frames


def by_litert(name: str, frames: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """LiteRT's y for each of some frames, one behind another."""
    interpreter = litert.Interpreter(model_content=MODELS[name]())
    interpreter.allocate_tensors()
    results = []
    for frame in frames:
        for detail in interpreter.get_input_details():
            interpreter.set_tensor(detail["index"], frame[detail["name"]])
        interpreter.invoke()
        results.append(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]))
    return results
