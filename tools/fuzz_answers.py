"""What executors answer to a file, and tokenizers to texts, for ``tools.fuzz``; and whether the
executors' answers agree."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from tests.support import mutants, tf_cases

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.frontends.load import load_text
from penstock.generation.chat import ChatTemplate
from penstock.generation.grammar import GrammarVocabulary
from penstock.generation.tokenizer import TextTokenizer

MAX_BYTES = 2**26
LIMITS = ps.Limits(
    max_bytes=MAX_BYTES, max_constant_bytes=MAX_BYTES, max_iterations=1000, max_nodes=10_000
)
EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret", "auto")
TIMEOUT_S = 1.0
# Operations whose answers differ between runs, or whose order other than data decides.
UNDEFINED = re.compile(
    rb"Random|Multinomial|Bernoulli|Dropout|Truncated|Variable|VarHandle|Assign|Stack|TensorArray"
)
Bits = Mapping[int, float]
"""by the size of floats in bytes, a part of a number"""
HALVES: Bits = {2: 2.0**-10}
"""the last bit of float16; that of bfloat16 is 8 times as much"""


def outcome(
    path: Path, executor: str, precision: str = "float32", nudged: Bits | None = None
) -> Any:
    """The outputs of all runs, or the ``PenstockError`` that there was. Where ``nudged`` has the
    size of floats, those in the feeds differ by what it has for it."""
    rng = np.random.default_rng(0)
    backends = None if executor == "auto" else ["numpy"]
    try:
        session = session_of(path, executor=executor, backends=backends, precision=precision)
        outputs = []
        for feeds, fetches, targets in runs_of(path, session, rng):
            if nudged is not None:
                feeds = {name: _nudged(x, rng, nudged) for name, x in feeds.items()}
            outputs.append(session.run(feeds, fetches, targets, timeout=TIMEOUT_S))
        return outputs
    except ps.InternalError:
        raise
    except ps.PenstockError as error:
        return error


def tokenizer_outcome(path: Path) -> Any:
    """The tokens and texts of a tokenizer's folder, or of a GGUF file's metadata in JSON, or the
    ``PenstockError`` that there was."""
    try:
        if path.is_dir():
            tokenizer = TextTokenizer.load(path)
        else:
            tokenizer = TextTokenizer.of_gguf(json.loads(path.read_bytes()))
        tokens = [tokenizer.encode(text) for text in ("", "hello world", "a" * 99, "é漢 <|end|>\0")]
        texts = [tokenizer.decode(own) for own in [*tokens, [0, tokenizer.size, 2**32 - 1]]]
        GrammarVocabulary(tokenizer).matcher("regex", "[a-z]+").compute_bitmask()
        if tokenizer.chat_templates:
            texts.append(ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hi"}]))
        return [tokens, texts]
    except ps.InternalError:
        raise
    except ps.PenstockError as error:
        return error


def session_of(path: Path, **options: Any) -> ps.Session:
    source: Any = path
    if path.suffix == ".txt":
        source = load_text(path.read_text(errors="replace"), LIMITS)
    return ps.compile(source, limits=LIMITS, **options)


def runs_of(path: Path, session: ps.Session, rng: np.random.Generator) -> list[Any]:
    """Feeds, fetches and targets: those of the case that a GraphDef is of, or of all types."""
    description = tf_cases.FOLDER / f"{path.stem}.json"
    if description.exists():
        runs = json.loads(description.read_text())["runs"][:2]
        return [(tf_cases.feeds(run), run["fetches"], run["targets"]) for run in runs]
    sizes: dict[str, int] = {}
    feeds = {port.name: mutants.feed(port.type, rng, sizes) for port in session.inputs}
    return [(feeds, None, None)]


def disagreements(path: Path, outcomes: Mapping[str, Any]) -> list[tuple[str, str]]:
    # How much memory and time there is, and what control flow can be structured, are no matters of
    # the model's meaning.
    excused = (ps.LimitExceeded, ps.DeadlineExceeded, ps.Unsupported)
    counted = {
        e: o
        for e, o in outcomes.items()
        if not isinstance(o, excused)
        and not isinstance(getattr(o, "__cause__", None), MemoryError)  # of the machine
    }
    refused = {e: o for e, o in counted.items() if isinstance(o, ps.PenstockError)}
    ran = {e: o for e, o in counted.items() if e not in refused}
    if not ran or (path.is_file() and UNDEFINED.search(path.read_bytes())):
        return []
    if refused:
        error, *_ = refused.values()
        # Control edges to nodes without effects are dropped where structured control flow is run:
        # what only they need, and fails, then does not run. Calls of functions by their names have
        # such edges to all nodes of the bodies.
        graph = ps.load(path, limits=LIMITS).graph if path.suffix in (".pb", ".pbtxt") else None
        edges = graph is not None and any(node.control_inputs for node in graph.walk())
        if edges and refused.keys() == {"frames"} and type(error) is ps.RunError:
            return []
        text = f"{', '.join(ran)} ran; {', '.join(refused)} did not: {type(error).__name__}: "
        return [("disagreement", f"{text}{str(error)[:300]}")]
    first, *others = [executor for executor in ran if executor != "auto"] or ["auto"]
    for other in others:
        if not alike(ran[first], ran[other]):
            if other == "interpret" and is_of_rounding(path, first, ran[other]):
                continue
            if not stays_finite(path) or is_of_last_bits(path, first, ran[first], ran[other]):
                continue
            return [("disagreement", f"{first} answers {ran[first]}, {other} {ran[other]}"[:600])]
    return []


def is_of_rounding(path: Path, executor: str, answer: Any) -> bool:
    """Whether the interpreter's answer is what an executor gives that rounds each value, and is so
    for certain: it has overflowed, or differs as much where the last bits of the feeds do."""
    if not alike(outcome(path, executor, "strict"), answer):
        return False
    return not are_finite(answer) or not alike(outcome(path, "interpret", nudged=HALVES), answer)


def is_of_last_bits(path: Path, executor: str, answer: Any, other: Any) -> bool:
    """Whether answers differ in integers alone, and in no more of these than the last bits of the
    feeds decide: integers that are made of floats differ by one, or from 0 to 255, where rounding
    takes a float across a whole number."""
    try:
        graph = ps.load(path, limits=LIMITS).graph
        infer_types(graph)
    except ps.PenstockError:
        return False
    values = [v for node in graph.walk() for v in node.inputs if v]
    dtypes = {v.dtype for v in values if v.dtype is not None}
    halves = any(dtype.kind in "fV" and dtype.itemsize == 2 for dtype in dtypes)
    bits = {**HALVES, 4: HALVES[2]} if halves else {**HALVES, 4: 2.0**-23, 8: 2.0**-52}
    nudged = outcome(path, executor, nudged=bits)
    apart, by_last_bits = integers_apart(answer, other), integers_apart(answer, nudged)
    return apart is not None and by_last_bits is not None and apart <= by_last_bits


def integers_apart(a: Any, b: Any) -> int | None:
    """The number of integers that differ; None if there are other differences."""
    if isinstance(a, list | tuple | dict) and type(a) is type(b) and len(a) == len(b):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        if isinstance(b, dict) and keys != b.keys():
            return None
        found = [integers_apart(a[key], b[key]) for key in keys]
        return None if None in found else sum([n for n in found if n is not None])
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape
    if arrays and a.dtype == b.dtype and a.dtype.kind in "iub":
        return int((a != b).sum())
    return 0 if alike(a, b) else None


def stays_finite(path: Path) -> bool:
    """Whether all values within the runs are finite: of sums that overflow, or have infinite terms,
    the order decides what they are (``docs/guarantees.md``)."""
    try:
        session = session_of(path, executor="linear", backends=["numpy"])
        for feeds, fetches, targets in runs_of(path, session, np.random.default_rng(0)):
            session.run(
                feeds, fetches, targets, timeout=TIMEOUT_S, observers=[ps.NanGuard(infinities=True)]
            )
    except ps.RunError:
        return False
    except ps.PenstockError:  # which the executors that are compared have met or not
        return True
    return True


def _nudged(x: Any, rng: np.random.Generator, bits: Bits) -> Any:
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fV" or x.dtype.itemsize not in bits:
        return x
    bit = bits[x.dtype.itemsize] * (8 if x.dtype.kind == "V" else 1)
    return (x.astype(np.float64) * (1 + bit * rng.choice([-1, 1], x.shape))).astype(x.dtype)


# Values in 16 bits are rounded once, or after each operation (decision 45). Of the official suite,
# attention as a function of 80 to 100 nodes differs most: from the input to the output lie nine
# roundings (both scales, two products, mask, differences, Exp, sum and quotient), and Exp makes the
# absolute error of a score a relative one, three to five roundings for scores of that size. By the
# measure of ``alike``, answers differ by 8.5 roundings in bfloat16 and 7.3 in float16. This is a
# little more than twice as much; wider types get what float16 needs.
ROUNDINGS = 20


def are_finite(values: Any) -> bool:
    """Whether all numbers in an answer are finite."""
    if isinstance(values, np.ndarray):
        is_bfloat16 = values.dtype.itemsize == 2 and values.dtype.kind == "V"
        array = values.astype(np.float32) if is_bfloat16 else values
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if isinstance(values, list | tuple | dict):
        return all(map(are_finite, values.values() if isinstance(values, dict) else values))
    return not isinstance(values, float) or isfinite(values)


def alike(a: Any, b: Any, roundings: float = ROUNDINGS) -> bool:
    """Whether two answers are the same but for rounding: they differ by at most ``roundings`` units
    of each element, and a fifth of that of the largest."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind not in "fcV":
            return bool(np.array_equal(a, b))
        is_bfloat16 = a.dtype.itemsize == 2 and a.dtype.kind == "V"
        most = roundings * (2.0**-8 if is_bfloat16 else 2.0**-11)
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        with np.errstate(all="ignore"):
            size = np.abs(a[np.isfinite(a)]).max(initial=0)
            return bool(np.allclose(a, b, rtol=most, atol=most / 5 * size, equal_nan=True))
    if isinstance(a, list | tuple):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(alike(x, y, roundings) for x, y in pairs)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key], roundings) for key in a)
    if isinstance(a, float):
        return alike(np.array(a), np.array(b), roundings)
    return bool(a == b)
