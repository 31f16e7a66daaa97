"""Time attention, decoding and loops beside peers: ``python -m bench.sequences``.

The networks have random weights (``bench.nets``) and are written into the cache folder. Decoders
run step after step, each fed the cache that the one before returned. Everything is measured with
one thread and two, and written to ``bench/sequences.md``; it may be measured in pieces
(``bench.turns``), for instance:

    python -m bench.sequences --only gpt2 --threads 1 --turns 1 --keep sequences.json
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx

from bench import nets
from bench.exports import CACHE
from bench.models import Feeds, Model
from bench.peers import installed
from bench.tables import OURS, Row, difference_table, run_table
from bench.trial import Job
from bench.turns import (
    UNFINISHED,
    Pieces,
    Rows,
    add_options,
    add_turn,
    reference,
    turns_of,
    turns_of_all,
)
from bench.versus import HERE, described

FOLDER = CACHE.parent / "nets-1"  # of other networks or weights: raise the number
ENGINES = (OURS, "onnxruntime", "openvino")
WEIGHTS = ("float32", "int8", "int4", "dynamic")
CACHES = (16, 1000)
THREADS = (1, 2)
TURNS = 3

Make = Callable[[], onnx.ModelProto]


def encoders() -> Iterator[Model]:
    for batch in (1, 3, 8):
        shape = {"x": (batch, 56 * 56, 96)}
        yield case(f"swin, batch {batch}", partial(nets.windows, batch), shape)
    for length in (16, 49, 128, 512):
        make = partial(nets.encoder, length, 768, 12, 4, masked=True)
        yield case(f"bert, {length} positions", make, {"x": (1, length, 768)}, mask=(1, length))
    make = partial(nets.encoder, 1500, 384, 6, 4, masked=False)
    yield case("whisper's encoder", make, {"x": (1, 1500, 384)})


def decoders() -> Iterator[Model]:
    for weights in WEIGHTS:
        yield from decoder(f"gpt2 {weights}", partial(nets.gpt2, weights), 12, 12)
        spelled = partial(nets.llama, weights, False)
        yield from decoder(f"llama {weights}", spelled, 12, 4)
        grouped = partial(nets.llama, weights, True)
        yield from decoder(f"llama grouped {weights}", grouped, 12, 4)
        yield from decoder(f"qwen grouped {weights}", partial(nets.qwen, weights), 12, 2)


def loops() -> Iterator[Model]:
    for cell in ("LSTM", "GRU", "GRU before"):
        make = partial(nets.keras_loop, cell, 50, 1, 64, 128)
        yield case(f"keras {cell}", make, {"x": (1, 50, 64)})
        make = partial(nets.keras_loop, cell, 100, 8, 256, 256)
        yield case(f"keras {cell}, wide", make, {"x": (8, 100, 256)})
    yield case("script GRU", partial(nets.script_loop, 1, 64, 128), {"x": (50, 1, 64)})
    yield case("scan LSTM", partial(nets.scan, 50, 1, 64, 128), {"x": (50, 1, 64)})
    yield case("counting loop", nets.counting_loop, {})


# Titles of the tables; their networks, none of which is made yet; the most that a ratio is to be,
# and the mean of all.
TABLES = (
    ("A run of an encoder", encoders, 1.0, 0.9),
    ("A step of a decoder", decoders, 0.9, 0.9),
    ("A run of a loop", loops, 0.7, 0.7),
)


def cases() -> list[Model]:
    return [model for _, networks, _, _ in TABLES for model in networks()]


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


def key_of(model: str, threads: int) -> str:
    return f"{model}; threads: {threads}"


def add(model: Model, threads: int, row: Row, inputs: str) -> None:
    """Add a turn of one network; ``inputs`` names the file that its feeds are written to."""
    path, feeds = model.path(), model.feeds()
    np.savez(inputs, *feeds.values())
    job = Job(OURS, threads, str(path), list(feeds), inputs, fed_back=model.fed_back)
    wanted = None if turns_of(row) else reference(model.name, job)
    add_turn(row, job, f"{model.name}, threads {threads}", wanted)


def markdown(rows: Rows) -> list[str]:
    lines = [
        "# Attention, decoding, loops",
        "",
        f"Written on {date.today().isoformat()}: {described()}.",
        "Engines in turn, each in its own process; a ratio is the median of the turns' ratios. "
        + turns_of_all(rows, [key_of(m.name, n) for m, n in product(cases(), THREADS)]),
    ]
    every: list[Row] = []
    for title, networks, most, most_mean in TABLES:
        keys = {key_of(m.name, n): (m.name, n) for m, n in product(networks(), THREADS)}
        table = [rows.get(key, Row(model, n)) for key, (model, n) in keys.items()]
        lines += run_table(table, ENGINES, title, most, most_mean)
        every += table
    return lines + difference_table(every, ENGINES)


def parse() -> Namespace:
    parser = ArgumentParser(prog="python -m bench.sequences", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add_option = parser.add_argument
    part = "networks whose names have one of these in them"
    add_option("--only", nargs="+", metavar="NAME", default=[""], help=part)
    add_option(
        "--threads", type=int, nargs="+", metavar="N", default=THREADS, help="1 2 by default"
    )
    add_options(parser, TURNS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    named = [model for model in cases() if any(part in model.name for part in arguments.only)]
    if not named:
        sys.exit("no such network; there are: " + ", ".join(m.name for m in cases()))
    chosen = {key_of(m.name, n): (m, n) for m, n in product(named, arguments.threads)}
    engines = [engine for engine in ENGINES if installed(engine)]
    pieces = Pieces(arguments)
    with tempfile.TemporaryDirectory() as folder:

        def add_to(key: str, rows: Rows) -> None:
            model, threads = chosen[key]
            row = rows.setdefault(key, Row(model.name, threads, {e: [] for e in engines}))
            add(model, threads, row, str(Path(folder) / "feeds.npz"))

        finished = pieces.measure(list(chosen), add_to)
    lines = markdown(pieces.rows)
    print("\n".join(["", *lines]))
    every = {key_of(model.name, n): n for model, n in product(cases(), THREADS)}
    if arguments.write or pieces.complete(every, ENGINES):
        (HERE / "sequences.md").write_text("\n".join(lines) + "\n")
    sys.exit(0 if finished else UNFINISHED)


if __name__ == "__main__":
    main()
