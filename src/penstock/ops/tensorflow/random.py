"""Random numbers, drawn as TensorFlow draws them: by the generator Philox (Salmon et al., Parallel
random numbers: as easy as 1, 2, 3, 2011), whose numbers depend on a key and a counter alone.

The operations with a key, or with a seed as input, give the same numbers in each run. Of those with
seeds as attributes, a node goes on where its last run ended, which it keeps in a variable, so that
runs of other shapes go on there, too; without seeds, a kernel seeds itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import ANY, INT64, ShapeError, TensorType, Type, find_dtype
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.common import array_operator, operator
from penstock.ops.tensorflow.state import exchange

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_PHILOX, _AUTOMATIC = 1, 3
_RESERVED = 256
"""blocks of numbers by which a node with seeds moves on for each element that it has drawn"""


def _blocks(key: int, counter: int, count: int) -> np.ndarray:
    """Return blocks [count, 4] of 32 random bits, of ``count`` counters from ``counter``."""
    return _blocks_at(key, counter, np.arange(count, dtype=np.uint64))


def _blocks_at(key: int, counter: int, offsets: np.ndarray) -> np.ndarray:
    """Return blocks [n, 4] of 32 random bits, of the counters ``counter`` plus ``offsets``."""
    # The counter has 128 bits: a carry out of its lower half goes to the upper one.
    low = offsets + np.uint64(counter % 2**64)
    carry = low < np.uint64(counter % 2**64)
    high = np.full(len(offsets), counter >> 64, np.uint64) + carry
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


def _truncated(dtype: np.dtype, count: int, key: int, counter: int) -> np.ndarray:
    """``count`` normal floats of less than 2. Two or four have 256 blocks each of their own, of
    which they take the first such numbers."""
    width = 2 if dtype == np.float64 else 4
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    result = np.empty((-(-count // width), width), dtype)
    missing, blocks = np.arange(len(result)), 4
    while missing.size:
        offsets = missing[:, np.newaxis] * (width * _RESERVED // 4) + np.arange(blocks)
        bits = _blocks_at(key, counter, offsets.reshape(-1).astype(np.uint64))
        normal = _normal(bits, wide).reshape(len(missing), -1)
        inside = np.abs(normal) < 2
        ready = inside.sum(1) >= width
        first = np.argsort(~inside[ready], 1, kind="stable")[:, :width]
        result[missing[ready]] = np.take_along_axis(normal[ready], first, 1)
        missing, blocks = missing[~ready], 2 * blocks
    return result.reshape(-1)


def _drawn(
    draw: _Draw, shape: np.ndarray, dtype: np.dtype, key: int, counter: int, *ends: np.ndarray
) -> np.ndarray:
    """An array of this shape by ``draw``, which gives two or four numbers for each block."""
    if shape.ndim != 1 or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise ShapeError(f"a shape is a vector of dims from 0, not {shape.tolist()}")
    dims = tuple(shape.tolist())
    size = int(np.prod(dims, dtype=object))
    reserve(size * 64)
    if draw is _truncated:
        return _truncated(dtype, size, key, counter)[:size].reshape(dims)
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


def _check_algorithm(alg: np.ndarray) -> None:
    if alg.tolist() not in (_PHILOX, _AUTOMATIC):
        raise ShapeError(f"algorithm {alg.tolist()} is none of 1 and 3, Philox")


def _infer(name: str) -> Callable[[Types, Attrs, Consts], Sequence[Type]]:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = find_dtype(attrs.get(name, ""))
        return (ANY if dtype is None else TensorType(dtype, rules.ints(types, consts, 0)),)

    return infer


_DRAWS: dict[str, tuple[_Draw, str]] = {
    "Uniform": (_unit, "dtype"),
    "Normal": (_normal, "dtype"),
    "TruncatedNormal": (_truncated, "dtype"),
    "UniformFullInt": (_whole, "dtype"),
    "UniformInt": (_between, "dtype"),
}


def _register_stateless(name: str, draw: _Draw, attr: str) -> None:
    @operator(f"{name}V2", infer=_infer(attr))
    def with_key(node: Node, types: Types) -> Kernel:
        dtype = common.named_dtype(node.attrs, attr)

        def run(
            shape: np.ndarray,
            key: np.ndarray,
            counter: np.ndarray,
            alg: np.ndarray,
            *ends: np.ndarray,
        ) -> np.ndarray:
            _check_algorithm(alg)
            if key.shape != (1,) or counter.shape != (2,):
                raise ShapeError(f"a key {key.shape} is [1], and a counter {counter.shape} [2]")
            low, high = counter.tolist()
            return _drawn(draw, shape, dtype, int(key[0]), low | high << 64, *ends)

        return Kernel(run)

    @operator(name, infer=_infer(attr))
    def with_seed(node: Node, types: Types) -> Kernel:
        dtype = common.named_dtype(node.attrs, attr)

        def run(shape: np.ndarray, seed: np.ndarray, *ends: np.ndarray) -> np.ndarray:
            return _drawn(draw, shape, dtype, *_scrambled(seed), *ends)

        return Kernel(run)


class _Draws:
    """Where the runs of a kernel begin to draw: at a key and a counter."""

    def __init__(self) -> None:
        self.key, second = secrets.randbits(64), secrets.randbits(64)
        self._next, self._lock = second << 64, threading.Lock()

    def take(self, blocks: int, states: Sequence[object]) -> tuple[int, int]:
        """Return the key, and the counter for as many blocks: those of the handle in ``states``,
        or of the kernel itself if there is none."""
        if states:
            return _key_and_counter(_skip(states[0], blocks))
        with self._lock:
            own, self._next = self._next, self._next + blocks
        return self.key, own % 2**128


def _key_and_counter(state: np.ndarray) -> tuple[int, int]:
    if state.shape != (3,) or state.dtype.itemsize != 8:
        raise ShapeError(f"the state of Philox is int64[3], not {state.dtype}{list(state.shape)}")
    low, high, key = (int(x) % 2**64 for x in state.tolist())
    return key, low | high << 64


def _skip(handle: object, blocks: int) -> np.ndarray:
    """Move the state in a variable on by as many blocks; return what it was."""

    def moved(state: np.ndarray) -> np.ndarray:
        key, counter = _key_and_counter(state)
        counter = (counter + blocks) % 2**128
        return np.array([counter % 2**64, counter >> 64, key], np.uint64).view(state.dtype)

    return exchange(handle, moved)


@operator("RngReadAndSkip", infer=rules.always(TensorType(INT64, (3,))), pure=False)
def read_and_skip(node: Node, types: Types) -> Kernel:
    def run(handle: object, alg: np.ndarray, delta: np.ndarray) -> np.ndarray:
        _check_algorithm(alg)
        return _skip(handle, int(delta) * _RESERVED)

    return Kernel(run)


def _register_stateful(name: str, draw: _Draw, attr: str, ends: int = 0) -> None:
    """An operation with the inputs shape, ``ends``, and perhaps the handle of its state."""

    @operator(name, infer=_infer(attr), pure=False, traits={"any order"})
    def compile(node: Node, types: Types) -> Kernel:
        dtype, draws = common.named_dtype(node.attrs, attr), _Draws()

        def run(shape: np.ndarray, *rest: np.ndarray) -> np.ndarray:
            blocks = int(np.prod(shape, dtype=object)) * _RESERVED
            return _drawn(draw, shape, dtype, *draws.take(blocks, rest[ends:]), *rest[:ends])

        return Kernel(run)


for _name, (_function, _attr) in _DRAWS.items():
    _own = "Stateless" if _function is _truncated else "StatelessRandom"
    _register_stateless(f"{_own}{_name}", _function, _attr)
_register_stateful("RandomUniform", _unit, "dtype")
_register_stateful("RandomStandardNormal", _normal, "dtype")
_register_stateful("TruncatedNormal", _truncated, "dtype")
_register_stateful("RandomUniformInt", _between, "Tout", ends=2)


@operator("RandomShuffle", infer=rules.same_type, pure=False, strings=True, traits={"any order"})
def shuffle(node: Node, types: Types) -> Kernel:
    """The rows in the order of Fisher and Yates."""
    draws = _Draws()

    def run(value: np.ndarray, *states: object) -> np.ndarray:
        count = len(value) if value.ndim else 1
        if count < 2:
            return value.copy()
        blocks = -(-(count - 1) // 4)
        reserve(count * 64)
        bits = _blocks(*draws.take(blocks, states), blocks).reshape(-1)[: count - 1]
        order = list(range(count))
        for i, step in enumerate((bits % np.arange(count, 1, -1)).tolist()):
            order[i], order[i + step] = order[i + step], order[i]
        return value[order]

    return Kernel(run)


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
    dtype, draws = common.named_dtype(node.attrs, "output_dtype", "int64"), _Draws()

    def run(logits: np.ndarray, count: np.ndarray, *states: object) -> np.ndarray:
        size = common.count(count, "num_samples")
        taken = len(logits) * -(-size // 4) * 8 if logits.ndim else 0
        return _chosen(logits, size, *draws.take(taken * _RESERVED, states), dtype)

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
