"""Makes ``tf_saved/state.npz.xz``, as ``make_keras.py`` does ``keras.npz.xz``: SavedModels whose state
is strings, a table that can change, and variables that are updated in places."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tensorflow as tf
from make import F, real, save
from make_keras import record
from make_text import words
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import (
    xla_dynamic_update_slice as dynamic_update_slice,
)


def spec(name: str, dtype: Any, *shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype, name=name)


class Index(tf.Module):
    """The identifiers of the nearest candidates, as of a model for retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.names = tf.Variable(words("a", "", "ä€", b"\xff\x00b", "long " * 40))
        self.candidates = tf.Variable(real(5, 3))

    @tf.function(input_signature=[spec("query", tf.float32, None, 3)])
    def call(self, query: tf.Tensor) -> dict[str, tf.Tensor]:
        scores, places = tf.math.top_k(query @ tf.transpose(self.candidates), 4)
        return {"scores": scores, "names": tf.strings.join([tf.gather(self.names, places), "."])}


class Changing(tf.Module):
    """A table with contents of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        self.table.insert(words("a", "b"), np.array([7, 8]))

    @tf.function(input_signature=[spec("x", tf.string, None)])
    def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"found": self.table.lookup(x), "size": self.table.size()}


class Scattered(tf.Module):
    """Rows of variables that are replaced, and added to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.text = tf.Variable(real(4, 2)), tf.Variable(words("p", "q"))

    @tf.function(input_signature=[spec("i", tf.int32, None), spec("x", tf.float32, None, 2)])
    def call(self, i: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
        results = {}
        for name in ("update", "add", "sub", "mul", "min", "max"):
            getattr(self.rows, f"scatter_{name}")(tf.IndexedSlices(x, i))
            results[name] = self.rows.read_value()
        pairs = tf.stack([i, i % 2], 1)
        for name in ("update", "add", "sub", "min", "max"):
            getattr(self.rows, f"scatter_nd_{name}")(pairs, x[:, 0])
            results[f"nd_{name}"] = self.rows.read_value()
        results["gathered"] = self.rows.gather_nd(pairs)
        self.text.assign(tf.strings.join([self.text, "!"]))
        return {**results, "text": self.text.read_value()}


class Sliced(tf.Module):
    """Slices of variables that are replaced, as of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.text = tf.Variable(real(6, 3)), tf.Variable(words("p", "q", "r"))
        self.rate = tf.Variable(real(3) + 3)

    @tf.function(input_signature=[spec("i", tf.int32), spec("x", tf.float32, 2, 3)])
    def call(self, i: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
        self.rows[1:3].assign(x)
        first = self.rows.read_value()
        self.rows[i].assign(x[0])
        self.rows[::3, tf.newaxis, 1:].assign(x[:, tf.newaxis, 1:])
        self.rows[..., ::-2].assign(tf.ones([6, 2]) * x[0, 0])
        self.text[1:].assign(tf.strings.join([self.text[1:], "!"]))
        self.rate.scatter_div(tf.IndexedSlices(x[0, :2] + 3, [2, 0]))
        return {
            "first": first,
            "rows": self.rows.read_value(),
            "text": self.text.read_value(),
            "rate": self.rate.read_value(),
            "moved": dynamic_update_slice(self.rows, x[:1, :2], tf.stack([i * 4, -i])),
        }


class Drawing(tf.Module):
    """Random numbers that go on from run to run, whatever the shapes are."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(7)

    @tf.function(input_signature=[spec("n", tf.int32)])
    def call(self, n: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            "uniform": tf.random.uniform([n], seed=3),
            "normal": tf.random.normal([n, 2], seed=4),
            "truncated": tf.random.truncated_normal([n], seed=5),
            "integers": tf.random.uniform([n], 0, 100, tf.int32, seed=6),
            "order": tf.random.shuffle(tf.range(n), seed=7),
            "categories": tf.random.categorical(tf.zeros([2, 40]), n, seed=8),
            "generated": self.generator.uniform([n]),
        }


class Rows(tf.Module):
    """Functions of rows of ragged tensors, which variants hold."""

    @tf.function(input_signature=[spec("x", tf.string, None)])
    def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        split = tf.strings.bytes_split(tf.strings.split(x))
        vector, matrix = (tf.RaggedTensorSpec([None] * rank, tf.string) for rank in (1, 2))
        first = tf.map_fn(lambda row: row[:, :1].flat_values, split, fn_output_signature=vector)
        last = tf.map_fn(lambda row: row[-1:], split, fn_output_signature=matrix)
        counts = tf.RaggedTensorSpec([None], tf.int64)
        numbers = tf.map_fn(tf.range, split.row_lengths(), fn_output_signature=counts)
        return {
            "first": first.to_tensor("-"),
            "last": last.to_tensor("-"),
            "numbers": numbers.to_tensor(-1),
            "lengths": tf.map_fn(lambda row: row.nrows(), split, fn_output_signature=tf.int64),
        }


def count(n: int) -> dict[str, np.ndarray]:
    return {"n": np.array(n, np.int32)}


if __name__ == "__main__":
    slices = [{"i": np.array(i, np.int32), "x": real(2, 3)} for i in (0, -1, 1)]
    for module, feeds, *later in (
        (Index(), {"query": real(2, 3)}),
        (Changing(), {"x": words("b", "q", "a")}),
        (Scattered(), {"i": np.array([2, 0, 3], np.int32), "x": real(3, 2).astype(F)}),
        (Sliced(), *slices),
        (Drawing(), count(3), count(5), count(3), count(40)),
        (Rows(), {"x": words("ab c", "", "def")}, {"x": words()}, {"x": words("")}),
    ):
        with TemporaryDirectory() as folder:
            tf.saved_model.save(module, folder, {"serving_default": module.call})
            record(type(module).__name__, Path(folder), feeds, *later)
    save("state", "tf_saved")
