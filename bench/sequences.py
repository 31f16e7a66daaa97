"""Time attention, decoding and loops beside peers: ``python -m bench.sequences``.

The networks have random weights (``bench.nets``) and are written into the cache folder. Decoders
run step after step, each fed the cache that the one before returned. Everything is measured with
one thread and two, and written to ``bench/sequences.md``; a part is only printed, for instance:

    python -m bench.sequences --only gpt2 --threads 1 --turns 3
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from bench import nets
from bench.exports import CACHE
from bench.models import Feeds, Model
from bench.peers import installed
from bench.tables import OURS
from bench.versus import HERE, Bench, Options

FOLDER = CACHE.parent / "nets-1"  # of other networks or weights: raise the number
ENGINES = (OURS, "onnxruntime", "openvino")
WEIGHTS = ("float32", "int8", "int4", "dynamic")
CACHES = (16, 1000)
TURNS = 3

Make = Callable[[], onnx.ModelProto]


def cases() -> Iterator[Model]:
    """All of them; none is made yet."""
    for batch in (1, 3, 8):
        shape = {"x": (batch, 56 * 56, 96)}
        yield case(f"swin, batch {batch}", partial(nets.windows, batch), shape)
    for length in (16, 49, 128, 512):
        make = partial(nets.encoder, length, 768, 12, 4, masked=True)
        yield case(f"bert, {length} positions", make, {"x": (1, length, 768)}, mask=(1, length))
    make = partial(nets.encoder, 1500, 384, 6, 4, masked=False)
    yield case("whisper's encoder", make, {"x": (1, 1500, 384)})
    for weights in WEIGHTS:
        yield from decoder(f"gpt2 {weights}", partial(nets.gpt2, weights), 12, 12)
        spelled = partial(nets.llama, weights, False)
        yield from decoder(f"llama {weights}", spelled, 12, 4)
        grouped = partial(nets.llama, weights, True)
        yield from decoder(f"llama grouped {weights}", grouped, 12, 4)
        yield from decoder(f"qwen grouped {weights}", partial(nets.qwen, weights), 12, 2)
    for cell in ("LSTM", "GRU"):
        make = partial(nets.keras_loop, cell, 50, 1, 64, 128)
        yield case(f"keras {cell}", make, {"x": (1, 50, 64)})
        make = partial(nets.keras_loop, cell, 100, 8, 256, 256)
        yield case(f"keras {cell}, wide", make, {"x": (8, 100, 256)})
    yield case("script GRU", partial(nets.script_loop, 1, 64, 128), {"x": (50, 1, 64)})
    yield case("scan LSTM", partial(nets.scan, 50, 1, 64, 128), {"x": (50, 1, 64)})
    yield case("counting loop", nets.counting_loop, {})


def case(
    name: str, make: Make, shapes: dict[str, tuple[int, ...]], **masks: tuple[int, ...]
) -> Model:
    def feeds() -> Feeds:
        rng = np.random.default_rng(1)
        arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
        arrays |= {n: np.ones(shape, np.int64) for n, shape in masks.items()}
        return arrays or {"n": np.array(1000)}

    return Model(name, partial(written, name, make), feeds)


def decoder(name: str, make: Make, layers: int, heads: int) -> Iterator[Model]:
    """Steps from caches of several lengths, of heads with 64 features."""
    caches = [f"past_{layer}_{kind}" for layer in range(layers) for kind in ("key", "value")]

    def feeds(length: int) -> Feeds:
        rng = np.random.default_rng(length)
        arrays = {n: rng.standard_normal((1, heads, length, 64)) * 0.1 for n in caches}
        ids = {"input_ids": np.array([[5]])}
        return ids | {n: array.astype(np.float32) for n, array in arrays.items()}

    fed_back = {name: i for i, name in enumerate(caches)}
    for length in CACHES:
        label, path = f"{name}, {length} positions", partial(written, name, make)
        yield Model(label, path, partial(feeds, length), fed_back=fed_back)


def written(name: str, make: Make) -> Path:
    """The file of a network, made if there is none yet."""
    path = FOLDER / f"{name.replace(' ', '-').replace(',', '')}.onnx"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        onnx.save(make(), part)
        part.rename(path)
    return path


def parse() -> tuple[Options, bool]:
    """The options, and whether all is measured, so that it is written."""
    parser = argparse.ArgumentParser(prog="python -m bench.sequences", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="networks whose names have one of these in them")
    add("--threads", type=int, nargs="+", metavar="N", help="of each engine; 1 2 by default")
    add("--turns", type=int, default=TURNS, help=f"{TURNS} by default")
    arguments = parser.parse_args()
    chosen = [
        model
        for model in cases()
        if not arguments.only or any(part in model.name for part in arguments.only)
    ]
    if not chosen:
        parser.error("no such network; there are: " + ", ".join(m.name for m in cases()))
    engines = [engine for engine in ENGINES if installed(engine)]
    options = Options(
        models=chosen,
        engines=engines,
        threads=arguments.threads or [1, 2],
        clients=(),
        turns=arguments.turns,
        file=None,
        complete=False,
    )
    complete = not arguments.only and not arguments.threads and len(engines) == len(ENGINES)
    return options, complete


def main() -> None:
    options, complete = parse()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for model in options.models:
            bench.measure(model)
    lines = bench.markdown()
    print("\n".join(["", *lines]))
    if complete and not bench.left_out:
        (HERE / "sequences.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
