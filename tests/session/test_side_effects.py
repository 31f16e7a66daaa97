"""Side effects of a process: no network, no pickle, no program, and no files but costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.support.onnx_text import model_from_text
from tests.support.tflite_models import model, subgraph

PROGRAM = """
import json, os, sys

events = []

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if isinstance(path, (str, bytes)) and flags & writes:
            events.append(["write", os.path.abspath(os.fsdecode(path))])
    elif event == "sqlite3.connect":
        events.append(["write", os.path.abspath(os.fsdecode(arguments[0]))])
    elif event.split(".")[0] in ("socket", "urllib", "pickle", "subprocess", "ftplib", "http"):
        events.append([event, str(arguments)[:200]])
    elif event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.rename", "os.mkdir"):
        events.append([event, str(arguments)[:200]])

import numpy as np
import penstock as ps

sys.addaudithook(watch)
source, options = sys.argv[1], json.loads(sys.argv[2])
session = ps.compile(source, **options)
feeds = {port.name: np.ones(2, np.float32) for port in session.inputs}
for _ in range(30):
    session.run(feeds)
session.submit(feeds).result()
session.close()
print(json.dumps(events))
"""


def path_of(kind: str, folder: Path) -> Path:
    """A model of a format: y = -x + w."""
    if kind == "onnx":
        text = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> {"
        text += " secret = Neg(x) y = Add(secret, w) }"
        path = folder / "m.onnx"
        options = {"save_as_external_data": True, "size_threshold": 0, "location": "w.bin"}
        onnx.save(model_from_text(text), path, **options)
    elif kind == "tflite":
        path = folder / "m.tflite"
        graph = subgraph({"x": ("float32", [2])}, [("NEG", ["x"], ["y"], None)], ["y"])
        path.write_bytes(model([graph]))
    else:
        path = folder / "m.pbtxt"
        path.write_text(
            'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }\n'
            'node { name: "y" op: "Neg" input: "x" attr { key: "T" value { type: DT_FLOAT } } }'
        )
    return path


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"autotune": True}, {"executor": "frames"}], ids=str)
@pytest.mark.parametrize("kind", ["onnx", "tflite", "pbtxt"])
def test_process_that_keeps_no_sessions_writes_costs_alone_and_asks_nobody(kind, options, tmp_path):
    source = path_of(kind, tmp_path)
    cache = tmp_path / "cache"
    environment = {**os.environ, "PENSTOCK_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    asked = json.dumps({"cache": False, **options})
    command = [sys.executable, "-c", PROGRAM, str(source), asked]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    others = [
        (event, what)
        for event, what in events
        if not (event in ("write", "os.mkdir", "os.rename") and str(cache) in what)
    ]
    assert others == []
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", source.name, "w.bin"}
    costs = [*cache.iterdir()] if "autotune" in options else []
    assert bool(costs) == ("autotune" in options)
    for path in costs:
        assert path.name.startswith("costs.sqlite")
        assert b"secret" not in path.read_bytes()  # names of models stay in the process
