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


if __name__ == "__main__":
    for module, feeds in (
        (Index(), {"query": real(2, 3)}),
        (Changing(), {"x": words("b", "q", "a")}),
        (Scattered(), {"i": np.array([2, 0, 3], np.int32), "x": real(3, 2).astype(F)}),
    ):
        with TemporaryDirectory() as folder:
            tf.saved_model.save(module, folder, {"serving_default": module.call})
            record(type(module).__name__, Path(folder), feeds)
    save("state", "tf_saved")
