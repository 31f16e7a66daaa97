"""Quantize models and measure what comes of it: ``python -m bench.quantize``.

Each model is quantized by ``penstock.quantize`` with samples that resemble what it is made for
(``bench.quantize_samples``) and an error of at most 1 % of the outputs' spread, with one thread.
Then both models run in turn, in a process of its own, on the first sample; the error is measured
again, on samples that the quantizer has not seen. With all models the results are written to
``bench/quantize.md``; a part of them is only printed:

    python -m bench.quantize --only mobilenetv2 magika

``--keep FILE`` keeps results from one call to the next, so that it can be stopped.
``--against-onnxruntime MODEL`` times ONNX Runtime's static quantizer beside ours, with 100 samples.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

import numpy as np
from tests.models.fetch import fetch, real_models

import penstock as ps
from bench.models import models
from bench.quantize_exports import NETWORKS, feeds_of, path_of
from bench.quantize_samples import samples
from bench.run import machine
from penstock.quantizing.measuring import TURNS, FloatReference, seconds_in_turns
from penstock.quantizing.samples import samples_of

HERE = Path(__file__).parent
COUNT, UNSEEN = 24, 12
MAX_ERROR, TIMEOUT = 0.01, 150.0
TARGETS = {"slower": 0, "time": 0.65, "kept": 1.0, "size": 0.3}
_SLOWER = 1.03  # times as long as the original from which on a model counts as slower


def _files() -> Iterator[tuple[str, Path, Mapping[str, np.ndarray]]]:
    """All models that are there: their names, files, and an input."""
    for model in models():
        try:
            yield model.name, model.path(), model.feeds()
        except (ImportError, OSError, RuntimeError) as error:
            print(f"{model.name} is left out: {error}", flush=True)
    for real in real_models(".tflite"):
        if real.package == "mediapipe":
            yield real.name, fetch(real), real.feeds()
    for name in NETWORKS:
        if path_of(name).exists():
            yield name, path_of(name), feeds_of(name)
        else:
            print(f"{name} is left out: python -m bench.quantize_exports makes it", flush=True)


def measure(name: str, path: Path, feeds: Mapping[str, np.ndarray]) -> dict:
    """Quantize a model; what it has become."""
    every = list(samples(name, path, feeds, COUNT + UNSEEN))
    begin = time.perf_counter()
    try:
        quantized = ps.quantize(
            str(path), every[:COUNT], max_error=MAX_ERROR, threads=1, timeout=TIMEOUT
        )
    except ps.PenstockError as error:
        return {"model": name, "refused": str(error).splitlines()[-1].strip()}
    seconds = time.perf_counter() - begin
    report = quantized.report
    original = ps.compile(str(path), threads=1, cache=False)
    candidate = ps.compile(quantized.model, threads=1, cache=False)
    unseen = FloatReference.of(original, samples_of(every[COUNT:], list(feeds)))
    times = seconds_in_turns([candidate, original], every[0], 4.0, 50 * TURNS)
    fastest = min(report["points"], key=lambda p: p["time"], default=None)
    return {
        "model": name,
        "seconds": seconds,
        "ms": times[1] * 1e3,
        "time": times[0] / times[1],
        "size": report["size"],
        "error": max(report["error"], report["error_chosen_by"]),
        "unseen": max(unseen.rms(candidate)),
        "fastest": None if fastest is None else fastest["time"],
        "types": Counter(layer["type"] for layer in report["layers"]),
    }


def markdown(rows: list[dict], beside: str) -> list[str]:
    """The page."""
    measured = [row for row in rows if "time" in row]
    mean = math.exp(sum(math.log(min(row["time"], 1e9)) for row in measured) / len(measured))
    slower = [row["model"] for row in measured if row["time"] > _SLOWER]
    kept = sum(row["error"] <= MAX_ERROR for row in measured) / len(measured)
    unseen = sum(row["unseen"] <= MAX_ERROR for row in measured) / len(measured)
    size = math.exp(sum(math.log(row["size"]) for row in measured) / len(measured))
    lines = [
        "# Quantized models",
        "",
        "Written by `python -m bench.quantize` on "
        f"{date.today().isoformat()}: {machine()}. Other processes shared the two cores.",
        f"`penstock.quantize` with {COUNT} samples, of which a quarter is held out, a largest "
        f"error of {MAX_ERROR:g} of the outputs' spread, one thread, and a deadline of "
        f"{TIMEOUT:.0f} s. Samples resemble what "
        "the models are made for; networks with random weights, and those whose names begin with "
        "`ts-`, get smooth pictures and random words. Times are shares of the float model's on "
        "Penstock, runs in turn, the fastest of each.",
        "",
        "| what | measured | wanted |",
        "|---|---|---|",
        f"| models | {len(measured)} | 40 |",
        f"| models slower than float32, by more than 3 % | {len(slower)}"
        f"{' (' + ', '.join(slower) + ')' if slower else ''} | {TARGETS['slower']} |",
        f"| time to float32, geometric mean | {mean:.3f} | {TARGETS['time']} |",
        f"| error kept on samples held out | {kept:.0%} | {TARGETS['kept']:.0%} |",
        f"| error kept on {UNSEEN} further samples | {unseen:.0%} | |",
        f"| size of weights, geometric mean | {size:.3f} | {TARGETS['size']} |",
        f"| size of weights above {TARGETS['size']} | "
        f"{sum(row['size'] > TARGETS['size'] for row in measured)} | 0 |",
        *([f"| {beside} |"] if beside else []),
        "",
        "`fastest`: the time of the fastest choice that was tried, whatever its error; `unseen`: "
        "the error on samples that the quantizer has not seen.",
        "",
        "| model | float32, ms | time | fastest | size | error | unseen | seconds | layers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "time" not in row:
            lines.append(f"| {row['model']} | refused: {row['refused']} | | | | | | | |")
            continue
        types = ", ".join(f"{n} {type_}" for type_, n in sorted(row["types"].items()))
        fastest = "" if row["fastest"] is None else f"{row['fastest']:.2f}"
        lines.append(
            f"| {row['model']} | {row['ms']:.3g} | {row['time']:.2f} | {fastest} | "
            f"{row['size']:.2f} | {row['error']:.4f} | {row['unseen']:.4f} | "
            f"{row['seconds']:.0f} | {types} |"
        )
    return lines


def beside_onnxruntime(name: str) -> str:
    """The seconds of ONNX Runtime's static quantizer and of ours, with 100 samples."""
    _, path, feeds = next(own for own in _files() if own[0] == name)
    data = list(samples(name, path, feeds, 100))
    begin = time.perf_counter()
    quantized = ps.quantize(str(path), data, max_error=0.02, threads=1)
    ours = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            Path(folder) / "data.npz",
            **{str(i): next(iter(s.values())) for i, s in enumerate(data)},
        )
        script = _ONNXRUNTIME.format(path=path, folder=folder, name=next(iter(feeds)))
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        theirs = time.perf_counter() - begin
    return (
        f"seconds to quantize {name} with 100 samples and an error of 2 %, "
        f"{len(quantized.report['points'])} choices tried | {ours:.1f} | {theirs:.1f}, which ONNX "
        "Runtime's static quantizer takes without a bound"
    )


_ONNXRUNTIME = """
import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
data = np.load("{folder}/data.npz")
class Reader(CalibrationDataReader):
    def __init__(self): self.rest = iter(data.files)
    def get_next(self):
        key = next(self.rest, None)
        return None if key is None else {{"{name}": data[key]}}
quant_pre_process("{path}", "{folder}/pre.onnx")
quantize_static("{folder}/pre.onnx", "{folder}/q.onnx", Reader(), quant_format=QuantFormat.QDQ,
                per_channel=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantize", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="models with one of these in them"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="results so far")
    parser.add_argument("--against-onnxruntime", metavar="MODEL")
    arguments = parser.parse_args()
    kept = arguments.keep
    content = json.loads(kept.read_text()) if kept and kept.exists() else {"rows": []}
    rows: list[dict] = content["rows"]
    known = {row["model"] for row in rows}
    for name, path, feeds in _files():
        if name in known or (arguments.only and not any(p in name for p in arguments.only)):
            continue
        rows.append(measure(name, path, feeds))
        print(json.dumps(rows[-1]), flush=True)
        if kept:
            kept.write_text(json.dumps(content, indent=1))
    if arguments.against_onnxruntime:
        content["beside"] = beside_onnxruntime(arguments.against_onnxruntime)
    lines = markdown(rows, content.get("beside", ""))
    print("\n".join(lines))
    if kept:
        kept.write_text(json.dumps(content, indent=1))
    if not arguments.only:
        (HERE / "quantize.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
