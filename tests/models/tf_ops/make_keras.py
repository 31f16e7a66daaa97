"""Makes ``tf_saved/keras.npz.xz``: SavedModels of Keras's preprocessing layers and of tables, and what
TensorFlow gives for them.

Needs TensorFlow (2.21) and Keras (3.15), as ``make.py`` does. Of each model there are ``name/file/...``
(the bytes of its files), ``name/in/...`` (what to feed) and ``name/out/...`` (what must come out).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from make import FOUND, save

WORDS = ["a", "b", "c", "z", "", "ä"]
TEXTS = ["the cat sat", "The  DOG ran, quickly! ...", "a fish ünd <br />", "", "fish fish cat"]
NUMBERS = [5, 7, 9, 0, 33, -4]
RNG = np.random.default_rng(5)


def record(
    name: str, folder: Path, feeds: dict[str, np.ndarray], *later: dict[str, np.ndarray]
) -> None:
    """The files of a SavedModel, and the answers of its signature: to ``feeds``, and to further
    feeds one after the other, with the roles "in_1" and "out_1", and so on."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "fingerprint.pb":
            key = f"{name}/file/{path.relative_to(folder)}"
            FOUND[key] = np.frombuffer(path.read_bytes(), np.uint8)
    run = tf.saved_model.load(str(folder)).signatures["serving_default"]
    FOUND[f"{name}/graph"] = np.empty(0, np.uint8)
    for i, fed in enumerate((feeds, *later)):
        end = f"_{i}" if i else ""
        answers = run(**{key: tf.constant(value) for key, value in fed.items()})
        for key, value in fed.items():
            FOUND[f"{name}/in{end}/{key}"] = value
        for key, value in answers.items():
            FOUND[f"{name}/out{end}/{key}"] = np.asarray(value.numpy())


def layer(name: str, part: Any, choices: list[Any], dtype: str, width: int = 3) -> None:
    """A model of one layer."""
    x = keras.Input((width,), dtype=dtype, name="x")
    kind = object if dtype == "string" else dtype
    fed = np.array(RNG.choice(np.array(choices, kind), (5, width)), kind)
    if len(choices) == 5:
        fed = np.array(choices, kind).reshape(5, 1)
    with TemporaryDirectory() as folder:
        keras.Model(x, part(x)).export(folder, verbose=False)
        record(name, Path(folder), {"x": fed})


def vectorization(**given: Any) -> Any:
    result = keras.layers.TextVectorization(**given)
    result.adapt(np.array(["the cat sat", "the dog ran, quickly!", "A fish sat"]))
    return result


def layers() -> None:
    lookup, integers = keras.layers.StringLookup, keras.layers.IntegerLookup
    some = {"vocabulary": ["a", "b", "c"]}
    for mode in ("int", "multi_hot", "count"):
        layer(f"StringLookup_{mode}", lookup(output_mode=mode, **some), WORDS, "string")
    layer("StringLookup_one_hot", lookup(output_mode="one_hot", **some), WORDS, "string", 1)
    weighted = lookup(output_mode="tf_idf", idf_weights=[0.5, 0.25, 0.1], **some)
    layer("StringLookup_tf_idf", weighted, WORDS, "string")
    layer("StringLookup_oov", lookup(num_oov_indices=3, **some), WORDS, "string")
    layer(
        "StringLookup_known", lookup(num_oov_indices=0, mask_token="", **some), WORDS[:3], "string"
    )
    layer("StringLookup_invert", lookup(invert=True, **some), [0, 1, 2, 3], "int64")
    layer("IntegerLookup", integers(vocabulary=[5, 7, 9]), NUMBERS, "int64")
    oov = integers(vocabulary=[5, 7, 9], num_oov_indices=2, mask_token=0)
    layer("IntegerLookup_oov", oov, NUMBERS, "int64")
    bins = {"bin_boundaries": [0.0, 0.5, 1.0]}
    reals = [-1.5, 0.0, 0.25, 0.75, 2.0, 1.0]
    layer("Discretization", keras.layers.Discretization(**bins), reals, "float32")
    hot = keras.layers.Discretization(output_mode="multi_hot", **bins)
    layer("Discretization_multi_hot", hot, reals, "float32")
    for mode, width in (("one_hot", 1), ("multi_hot", 3), ("count", 3)):
        encoding = keras.layers.CategoryEncoding(num_tokens=4, output_mode=mode)
        layer(f"CategoryEncoding_{mode}", encoding, [0, 1, 2, 3], "int64", width)
    layer("Hashing", keras.layers.Hashing(num_bins=10), WORDS, "string")
    layer("Hashing_salt", keras.layers.Hashing(num_bins=10, salt=[133, 137]), WORDS, "string")
    layer("Hashing_mask", keras.layers.Hashing(num_bins=10, mask_value=""), WORDS, "string")
    layer("Hashing_numbers", keras.layers.Hashing(num_bins=10), NUMBERS, "int64")
    inputs = [keras.Input((1,), dtype="string", name=name) for name in "ab"]
    for mode in ("int", "one_hot"):
        crossing = keras.layers.HashedCrossing(num_bins=5, output_mode=mode)
        fed = {key: np.array(RNG.choice(WORDS, (5, 1)), object) for key in "ab"}
        with TemporaryDirectory() as folder:
            keras.Model(inputs, crossing(inputs)).export(folder, verbose=False)
            record(f"HashedCrossing_{mode}", Path(folder), fed)
    for name, given in (
        ("int", {"output_sequence_length": 6}),
        ("open", {}),
        ("multi_hot", {"output_mode": "multi_hot"}),
        ("count", {"output_mode": "count"}),
        ("tf_idf", {"output_mode": "tf_idf"}),
        ("characters", {"split": "character", "output_sequence_length": 8}),
        ("ngrams", {"ngrams": 2, "output_sequence_length": 6}),
        ("whole", {"standardize": None, "split": None, "output_sequence_length": 2}),
        ("lower", {"standardize": "lower"}),
        ("strip", {"standardize": "strip_punctuation", "ragged": False}),
    ):
        layer(f"TextVectorization_{name}", vectorization(**given), TEXTS, "string", 1)


class Vocabulary(tf.Module):
    """Tables of a file: words by line, and their numbers and notes by tabs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        lines = folder / "words.tsv"
        lines.write_text("red\t7\twarm\nblue\t-1\tcold\ngrün\t3\t\n")
        kinds = tf.lookup.TextFileIndex

        def table(key: Any, at: int, value: Any, value_at: int, default: Any, **more: Any) -> Any:
            source = tf.lookup.TextFileInitializer(str(lines), key, at, value, value_at, **more)
            return tf.lookup.StaticHashTable(source, default)

        self.tables = [
            table(tf.string, 0, tf.int64, 1, 99),
            table(tf.string, 0, tf.string, 2, "?", vocab_size=2),
            table(tf.string, kinds.WHOLE_LINE, tf.int64, kinds.LINE_NUMBER, -1, delimiter="|"),
        ]
        source = tf.lookup.TextFileInitializer(
            str(lines), tf.string, 0, tf.int64, kinds.LINE_NUMBER
        )
        self.vocabulary = tf.lookup.StaticVocabularyTable(source, 5)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="x")])
    def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        found = {f"table_{i}": table.lookup(x) for i, table in enumerate(self.tables)}
        found["vocabulary"] = self.vocabulary.lookup(x)
        found["size"] = self.vocabulary.size() + self.tables[1].size()
        return found


def files() -> None:
    with TemporaryDirectory() as folder:
        module = Vocabulary(Path(folder))
        saved = Path(folder) / "saved"
        tf.saved_model.save(module, str(saved), signatures=module.call)
        x = np.array(["red", "grün", "blue", "", "red\t7\twarm", "pink"], object)
        record("Vocabulary", saved, {"x": x})


if __name__ == "__main__":
    layers()
    files()
    save("keras", "tf_saved")
