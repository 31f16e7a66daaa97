"""Makes ``random.npz.xz``, as ``make.py`` does ``cases.npz.xz``: random numbers with seeds."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from make import case, save, several

FLOATS = (tf.float16, tf.float32, tf.float64)


def stateless() -> None:
    seeds = {"seed": np.array([-5, 2**40 + 3], np.int64)}
    shape = np.array([3, 5], np.int32)
    case("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounter", seeds)
    small = {"seed": np.array([-5, 7], np.int32)}
    case("StatelessRandomGetKeyCounter_dynamic", "StatelessRandomGetKeyCounter", small)
    ends = {"minval": np.int32(-7), "maxval": np.int32(2**31 - 1)}
    far = {"minval": np.int64(-7), "maxval": np.int64(2**40)}
    drawn = {"StatelessRandomUniform": FLOATS, "StatelessRandomNormal": FLOATS}
    drawn["StatelessRandomUniformFullInt"] = (tf.int32, tf.int64, tf.uint64)
    for name, kinds in drawn.items():
        for kind in kinds:
            case(f"{name}_{kind.name}", name, seeds, shape=shape, dtype=kind)
    for name, given in (("int32", ends), ("int64", far)):
        label = f"StatelessRandomUniformInt_{name}"
        case(label, "StatelessRandomUniformInt", seeds | given, shape=shape)
    keyed = {
        "key": np.array([2**63 + 9], np.uint64),
        "counter": np.array([2**64 - 2, 3], np.uint64),  # which carries
        "alg": np.int32(1),
    }
    for name, more in (
        ("StatelessRandomUniformV2", {"dtype": tf.float32}),
        ("StatelessRandomNormalV2", {"dtype": tf.float32}),
        ("StatelessRandomUniformFullIntV2", {"dtype": tf.uint32}),
        ("StatelessRandomUniformIntV2", ends),
    ):
        case(name, name, keyed, shape=np.array([19], np.int32), **more)
    case("StatelessRandomUniformV2_dynamic", "StatelessRandomUniformV2", keyed | {"shape": shape})
    none = np.array([2, 0], np.int32)
    case("StatelessRandomUniformV2_none", "StatelessRandomUniformV2", keyed, shape=none)


def with_seeds() -> None:
    for seed, second in ((3, -4), (0, 9)):
        seeds = {"seed": seed, "seed2": second}
        given = {"shape": np.array([2, 9], np.int64)}
        for name in ("RandomUniform", "RandomStandardNormal"):
            case(f"{name}_{seed}", name, given, dtype=tf.float32, **seeds)
            none = {"shape": np.array([2, 0], np.int64)}
            case(f"{name}_{seed}_none", name, none, dtype=tf.float64, **seeds)
        ends = {"minval": np.int64(-2), "maxval": np.int64(50)}
        case(f"RandomUniformInt_{seed}", "RandomUniformInt", given | ends, **seeds)

        logits = {"logits": np.log(np.array([[1, 2, 3, 0], [0, 0, 1, 9]], np.float32) + 1e-30)}
        case(f"Multinomial_{seed}", "Multinomial", logits, num_samples=np.int32(7), **seeds)
    given = logits | {"seed": np.array([3, -1], np.int64), "num_samples": np.int32(9)}
    case("StatelessMultinomial_dynamic", "StatelessMultinomial", given, output_dtype=tf.int32)

    def stacked(count: tf.Tensor) -> list[tf.Tensor]:
        """Draws of one kernel, one after the other."""
        draw = lambda i: tf.random.uniform([3], seed=7)  # noqa: E731
        more = {"fn_output_signature": tf.float32, "parallel_iterations": 1}
        return [tf.map_fn(draw, tf.range(count), **more)]

    several("RandomUniform_again", stacked, {"count": np.array(4, np.int32)})


if __name__ == "__main__":
    stateless()
    with_seeds()
    save("random")
