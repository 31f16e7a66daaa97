"""Makes ``tables.npz.xz``, as ``make.py`` does ``cases.npz.xz``: tables of either version, which
branches and loops of either form look up."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from make import save, several
from make_text import words
from tensorflow.python.ops import gen_lookup_ops

v1 = tf.compat.v1
KEYS, NUMBERS = ["a", "b", "c"], np.array([5, -6, 7], np.int64)


def table() -> tf.lookup.StaticHashTable:
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(KEYS, NUMBERS), -1)


def of_version_1(keys: tf.Tensor) -> list[tf.Tensor]:
    handle = gen_lookup_ops.hash_table(key_dtype=tf.string, value_dtype=tf.int64)
    filled = gen_lookup_ops.initialize_table(handle, KEYS, NUMBERS)
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, filled)
    values = gen_lookup_ops.lookup_table_find(handle, keys, np.int64(-1))
    return [values, gen_lookup_ops.lookup_table_size(handle)]


def looped(keys: tf.Tensor) -> list[tf.Tensor]:
    own = table()
    count = tf.constant(0, tf.int64)
    _, total = v1.while_loop(
        lambda i, _: i < tf.size(keys), lambda i, s: (i + 1, s + own.lookup(keys[i])), (0, count)
    )
    return [total, tf.map_fn(own.lookup, keys, fn_output_signature=tf.int64)]


def branched(keys: tf.Tensor) -> list[tf.Tensor]:
    own = table()
    few = tf.size(keys) < 3
    return [v1.cond(few, lambda: own.lookup(keys), lambda: own.lookup(keys[1:]) * 2)]


if __name__ == "__main__":
    given = {"keys": words("a", "q", "c", "b")}
    several("LookupTableFind", of_version_1, given)
    for form in (1, 2):
        (v1.enable_control_flow_v2 if form == 2 else v1.disable_control_flow_v2)()
        several(f"LookupTableFindV2_looped_{form}", looped, given)
        several(f"LookupTableFindV2_branched_{form}", branched, given)
    save("tables")
