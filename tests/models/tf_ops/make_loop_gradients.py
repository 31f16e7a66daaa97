"""Makes ``tf_gradients/loops.npz.xz``: gradients of loops, branches and tensor arrays, as functions call
one another (``v2_...``, first and second derivatives) and as frames (``v1_...``).

Needs TensorFlow (2.21), as ``make.py`` does, and stores the same of each case.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from make import F, save, several

X = (np.arange(1, 5) / 4).astype(F)


def _array(size: int) -> tf.TensorArray:
    return tf.TensorArray(tf.float32, size=size)


def _repeated(x: tf.Tensor, body: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Three times ``body`` of the iteration and the value."""
    return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, body(i, a)), [0, x])[1]


def mapped(x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(lambda e: e * e * e, x)


def folded(x: tf.Tensor) -> tf.Tensor:
    return tf.foldl(lambda a, e: a * 0.5 + e * e, x)


def scanned(x: tf.Tensor) -> tf.Tensor:
    return tf.scan(lambda a, e: a * 0.5 + e * e, x)


def written(x: tf.Tensor) -> tf.Tensor:
    """A tensor array that a loop writes."""
    values = [0, x, _array(3)]
    return tf.while_loop(
        lambda i, *_: i < 3, lambda i, a, t: (i + 1, a * x, t.write(i, a)), values
    )[2].stack()


def read(x: tf.Tensor) -> tf.Tensor:
    """A tensor array that a loop reads."""
    t = tf.TensorArray(tf.float32, size=4).unstack(x)
    return tf.while_loop(
        lambda i, a: i < 4, lambda i, a: (i + 1, a * t.read(i) + a), [0, tf.constant(1.0)]
    )[1]


def skipped(x: tf.Tensor) -> tf.Tensor:
    """A tensor array of which the loop writes every other element, twice as large as needed."""
    t = tf.TensorArray(tf.float32, size=8, element_shape=[4])
    t = tf.while_loop(
        lambda i, t: i < 4, lambda i, t: (i + 1, t.write(2 * i, x * tf.cast(i, F))), [0, t]
    )[1]
    return t.stack() + t.read(2)


def nested_arrays(x: tf.Tensor) -> tf.Tensor:
    def body(i: tf.Tensor, a: tf.Tensor, t: tf.TensorArray) -> tuple[object, ...]:
        _, b, u = tf.while_loop(
            lambda j, *_: j < 3,
            lambda j, b, u: (j + 1, b * 0.9, u.write(j, tf.reduce_sum(b))),
            [0, a, _array(3)],
        )
        return i + 1, b, t.write(i, tf.reduce_sum(u.stack()))

    return tf.while_loop(lambda i, *_: i < 3, body, [0, x, _array(3)])[2].stack()


def nested_maps(x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(lambda row: tf.map_fn(lambda e: e * e * row[0], row), tf.reshape(x, [2, 2]))


def branch_in_loop(x: tf.Tensor) -> tf.Tensor:
    return _repeated(x, lambda i, a: tf.cond(i % 2 < 1, lambda: a * x, lambda: tf.tanh(a)))


def branches_in_nested_loops(x: tf.Tensor) -> tf.Tensor:
    def inner(a: tf.Tensor) -> tf.Tensor:
        return _repeated(a, lambda j, b: tf.cond(j % 2 < 1, lambda: tf.sin(b) * x, lambda: b * b))

    return _repeated(x, lambda i, a: tf.cond(i > 0, lambda: inner(a), lambda: a + x))


def switch_in_loop(x: tf.Tensor) -> tf.Tensor:
    return _repeated(
        x, lambda i, a: tf.switch_case(i, [lambda: a * x, lambda: tf.tanh(a), lambda: a * a])
    )


def loop_in_branch(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: _repeated(x, lambda i, a: tf.sin(a) * x), lambda: x * 2.0)


def loop_in_other_branch(x: tf.Tensor) -> tf.Tensor:
    """A loop that does not run."""
    return tf.cond(x[0] > 1, lambda: _repeated(x, lambda i, a: tf.sin(a) * x), lambda: x * 2.0)


def loops_in_both_branches(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        x[0] > 0,
        lambda: _repeated(x, lambda i, a: tf.sin(a) * x),
        lambda: _repeated(x, lambda i, a: tf.cos(a) + x),
    )


def sliced(x: tf.Tensor) -> tf.Tensor:
    return _repeated(x, lambda i, a: tf.concat([a[1:] * x[:-1], a[:1] * a[::-1][0]], 0))


def recurrent(x: tf.Tensor) -> tf.Tensor:
    weights = tf.reshape(x, [2, 2])

    def step(state: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.matmul(state + row[None], weights))

    return tf.scan(step, tf.reshape(x, [2, 2]), tf.ones([1, 2]))


def gradient(function: Callable[[tf.Tensor], tf.Tensor], order: int) -> Callable[..., object]:
    """What ``several`` takes: a graph of the function and its derivatives up to this order."""

    def build(x: tf.Tensor) -> list[tf.Tensor]:
        results = [function(x)]
        for _ in range(order):
            results += tf.gradients(results[-1], [x])
        return results

    return build


def taped(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., object]:
    @tf.function(autograph=False)
    def call(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return lambda x: [call(x)]


FUNCTIONS = (
    *(mapped, folded, scanned, written, read, nested_arrays, nested_maps, branch_in_loop),
    *(branches_in_nested_loops, switch_in_loop, loop_in_branch, loop_in_other_branch),
    *(loops_in_both_branches, sliced, recurrent),
)


if __name__ == "__main__":
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    v1.disable_control_flow_v2()  # which gives loops no second derivatives
    for function in FUNCTIONS:
        several(f"v1_{function.__name__}", gradient(function, 1), {"x": X})
    v1.enable_control_flow_v2()
    for function in (*FUNCTIONS, skipped):
        several(f"v2_{function.__name__}", gradient(function, 2), {"x": X})
    for function in (mapped, branch_in_loop, recurrent):
        several(f"taped_{function.__name__}", taped(function), {"x": X})
    save("loops", "tf_gradients")
