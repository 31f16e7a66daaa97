"""Random numbers, drawn as TensorFlow draws them: by the generator Philox (Salmon et al., Parallel
random numbers: as easy as 1, 2, 3, 2011), whose numbers depend on a key and a counter alone.

The operations with a key, or with a seed as input, give the same numbers in each run. Of those with
seeds as attributes, a kernel goes on where its last run ended; without seeds, it seeds itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import ANY, ShapeError, TensorType, Type, find_dtype
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.common import array_operator, operator

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_PHILOX, _AUTOMATIC = 1, 3
_RESERVED = 256
"""blocks of numbers by which a kernel with seeds moves on for each element that it has drawn"""


def _blocks(key: int, counter: int, count: int) -> np.ndarray:
    """Return blocks [count, 4] of 32 random bits, of ``count`` counters from ``counter``."""
    # The counter has 128 bits: a carry out of its lower half goes to the upper one.
    low = (np.arange(count, dtype=np.uint64) + np.uint64(counter % 2**64)).astype(np.uint64)
    carry = low < np.uint64(counter % 2**64)
    high = np.full(count, counter >> 64, np.uint64) + carry
    c = [low & _LOW, low >> _HALF, high & _LOW, high >> _HALF]
    k0, k1 = key % 2**32, key >> 32
    for _ in range(10):
        # Products of 32 bits by 32, of which both halves are used.
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> _HALF) ^ c[1] ^ np.uint64(k0),
            b & _LOW,
            (a >> _HALF) ^ c[3] ^ np.uint64(k1),
            a & _LOW,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(c, 1).astype(np.uint32)


def _wide(bits: np.ndarray) -> np.ndarray:
    """Join pairs of 32 bits, the lower first."""
    return bits[:, ::2].astype(np.uint64) | bits[:, 1::2].astype(np.uint64) << _HALF


def _unit(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats from 0 to below 1: the lowest random bits are those of the fraction."""
    if dtype == np.float64:  # of each pair, the first has the higher bits
        fraction = (bits[:, ::2].astype(np.uint64) & np.uint64(0xFFFFF)) << _HALF | bits[:, 1::2]
        return (fraction | np.uint64(1023 << 52)).view(np.float64) - 1
    if dtype == np.float32:
        return (bits & np.uint32(0x7FFFFF) | np.uint32(127 << 23)).view(np.float32) - np.float32(1)
    digits = 10 if dtype == np.float16 else 7
    return ((bits & np.uint32(2**digits - 1)).astype(np.float32) * 2.0**-digits).astype(dtype)


def _normal(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Normal floats in pairs, by the transform of Box and Muller."""
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    u = _unit(bits, wide)
    # TensorFlow multiplies by pi in float64, and rounds the angle to float32.
    angle = (2 * np.pi * u[:, 1::2].astype(np.float64)).astype(wide)
    radius = np.sqrt(-2 * np.log(np.maximum(u[:, ::2], wide.type(1e-7))))
    pairs = np.stack([np.sin(angle) * radius, np.cos(angle) * radius], 2)
    return pairs.reshape(len(bits), 2 * pairs.shape[1]).astype(dtype, copy=False)


def _whole(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return (_wide(bits) if dtype.itemsize == 8 else bits).view(dtype)


def _between(bits: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Integers from ``low`` to below ``high``."""
    if low.size != 1 or high.size != 1 or low.item() >= high.item():
        raise ShapeError(f"minval {low.tolist()} must be a number below maxval {high.tolist()}")
    unsigned = np.dtype(f"u{low.dtype.itemsize}")
    steps = _whole(bits, unsigned) % unsigned.type(high.item() - low.item())
    return (steps + low.reshape(1).view(unsigned)).view(low.dtype)


_Draw = Callable[..., np.ndarray]


def _drawn(
    draw: _Draw, shape: np.ndarray, dtype: np.dtype, key: int, counter: int, *ends: np.ndarray
) -> np.ndarray:
    """An array of this shape by ``draw``, which gives two or four numbers for each block."""
    if shape.ndim != 1 or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise ShapeError(f"a shape is a vector of dims from 0, not {shape.tolist()}")
    dims = tuple(shape.tolist())
    size = int(np.prod(dims, dtype=object))
    reserve(size * 64)
    # A block gives four numbers of up to 32 bits, or two of 64.
    bits = _blocks(key, counter, -(-size // (2 if dtype.itemsize == 8 else 4)))
    numbers = draw(bits, *(ends or (dtype,)))
    return numbers.reshape(-1)[:size].reshape(dims)


def _scrambled(seed: np.ndarray) -> tuple[int, int]:
    """The key and counter of a seed of two integers."""
    if seed.shape != (2,) or seed.dtype.kind not in "iu":
        raise ShapeError(f"a seed is two integers, not {seed.dtype}{list(seed.shape)}")
    first, second = (int(x) % 2**64 for x in seed.tolist())
    a, b, c, d = _blocks(0x02461E293EC8F720, first | second << 64, 1)[0].tolist()
    return a | b << 32, (c | d << 32) << 64


def _infer(name: str) -> Callable[[Types, Attrs, Consts], Sequence[Type]]:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = find_dtype(attrs.get(name, ""))
        return (ANY if dtype is None else TensorType(dtype, rules.ints(types, consts, 0)),)

    return infer


_DRAWS: dict[str, tuple[_Draw, str]] = {
    "Uniform": (_unit, "dtype"),
    "Normal": (_normal, "dtype"),
    "UniformFullInt": (_whole, "dtype"),
    "UniformInt": (_between, "dtype"),
}


def _register_stateless(name: str, draw: _Draw, attr: str) -> None:
    @operator(f"StatelessRandom{name}V2", infer=_infer(attr))
    def with_key(node: Node, types: Types) -> Kernel:
        dtype = common.named_dtype(node.attrs, attr)

        def run(
            shape: np.ndarray,
            key: np.ndarray,
            counter: np.ndarray,
            alg: np.ndarray,
            *ends: np.ndarray,
        ) -> np.ndarray:
            if alg.tolist() not in (_PHILOX, _AUTOMATIC):
                raise ShapeError(f"algorithm {alg.tolist()} is none of 1 and 3, Philox")
            if key.shape != (1,) or counter.shape != (2,):
                raise ShapeError(f"a key {key.shape} is [1], and a counter {counter.shape} [2]")
            low, high = counter.tolist()
            return _drawn(draw, shape, dtype, int(key[0]), low | high << 64, *ends)

        return Kernel(run)

    @operator(f"StatelessRandom{name}", infer=_infer(attr))
    def with_seed(node: Node, types: Types) -> Kernel:
        dtype = common.named_dtype(node.attrs, attr)

        def run(shape: np.ndarray, seed: np.ndarray, *ends: np.ndarray) -> np.ndarray:
            return _drawn(draw, shape, dtype, *_scrambled(seed), *ends)

        return Kernel(run)


class _Draws:
    """The key of a kernel with seeds as attributes, and where its next run begins to draw."""

    def __init__(self, attrs: Attrs) -> None:
        seeds = [attrs["seed"], attrs["seed2"]]
        if not any(seeds):
            seeds = [secrets.randbits(64), secrets.randbits(64)]
        self.key, second = (seed % 2**64 for seed in seeds)
        self._next, self._lock = second << 64, threading.Lock()

    def take(self, count: int) -> tuple[int, int]:
        """Return the key, and the counter for as many elements."""
        with self._lock:
            own, self._next = self._next, self._next + count * _RESERVED
        return self.key, own % 2**128


def _register_stateful(name: str, draw: _Draw, attr: str) -> None:
    @operator(name, infer=_infer(attr), pure=False, traits={"any order"})
    def compile(node: Node, types: Types) -> Kernel:
        dtype, draws = common.named_dtype(node.attrs, attr), _Draws(node.attrs)

        def run(shape: np.ndarray, *ends: np.ndarray) -> np.ndarray:
            taken = draws.take(int(np.prod(shape, dtype=object)))
            return _drawn(draw, shape, dtype, *taken, *ends)

        return Kernel(run)


for _name, (_function, _attr) in _DRAWS.items():
    _register_stateless(_name, _function, _attr)
_register_stateful("RandomUniform", _unit, "dtype")
_register_stateful("RandomStandardNormal", _normal, "dtype")
_register_stateful("RandomUniformInt", _between, "Tout")

# Categories.


def _infer_categories(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    logits, count = rules.tensor(types, 0).shape, rules.ints(types, consts, 1)
    rows = logits[0] if logits else None
    dims = (rows, count[0] if count else None)
    return (TensorType(common.named_dtype(attrs, "output_dtype", "int64"), dims),)


def _chosen(logits: np.ndarray, count: int, key: int, counter: int, dtype: np.dtype) -> np.ndarray:
    """For each row, ``count`` categories, of probabilities by the softmax of its finite logits."""
    if logits.ndim != 2 or not logits.shape[1]:
        raise ShapeError(f"logits must be [rows, classes], not {logits.shape}")
    rows = len(logits)
    reserve(rows * (count * 64 + logits.shape[1] * 32))
    wide = logits.astype(np.float64)
    wide[~np.isfinite(wide)] = -np.inf
    # A row without finite logits has the sum 0, and gives no category of its own.
    top = np.maximum(wide.max(1, keepdims=True), np.finfo(np.float64).min)
    edges = np.exp(wide - top).cumsum(1)
    draws = _unit(_blocks(key, counter, -(-rows * count // 2)), np.dtype(np.float64)).reshape(-1)
    ends = draws[: rows * count].reshape(rows, count) * edges[:, -1:]
    # As in TensorFlow, a draw of 0 takes the first class with a share.
    found = [np.searchsorted(*pair, side="right") for pair in zip(edges, ends, strict=True)]
    return np.array(found, dtype).reshape(rows, count)


@operator("Multinomial", infer=_infer_categories, pure=False, traits={"any order"})
def multinomial(node: Node, types: Types) -> Kernel:
    dtype, draws = common.named_dtype(node.attrs, "output_dtype", "int64"), _Draws(node.attrs)

    def run(logits: np.ndarray, count: np.ndarray) -> np.ndarray:
        size = common.count(count, "num_samples")
        taken = len(logits) * -(-size // 4) * 8 if logits.ndim else 0
        return _chosen(logits, size, *draws.take(taken), dtype)

    return Kernel(run)


@operator("StatelessMultinomial", infer=_infer_categories)
def stateless_multinomial(node: Node, types: Types) -> Kernel:
    dtype = common.named_dtype(node.attrs, "output_dtype", "int64")

    def run(logits: np.ndarray, count: np.ndarray, seed: np.ndarray) -> np.ndarray:
        return _chosen(logits, common.count(count, "num_samples"), *_scrambled(seed), dtype)

    return Kernel(run)


_KEY = TensorType(np.dtype(np.uint64), (1,))
_COUNTER = TensorType(np.dtype(np.uint64), (2,))


@array_operator("StatelessRandomGetKeyCounter", infer=rules.always(_KEY, _COUNTER))
def key_and_counter(seed: np.ndarray) -> tuple[np.ndarray, ...]:
    key, counter = _scrambled(seed)
    return np.array([key], np.uint64), np.array([counter % 2**64, counter >> 64], np.uint64)


@operator("StatelessRandomGetAlg", infer=rules.always(TensorType(INT32, ())))
def algorithm(node: Node, types: Types) -> Kernel:
    return Kernel(lambda: np.array(_PHILOX, np.int32))
