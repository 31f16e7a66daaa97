"""A classifier of texts that takes text: its tokenizer is part of the graph.

``python examples/classify_text.py FOLDER TEXT...`` learns from a folder with a folder of text files
for each class, and prints the class of each TEXT (a file, or the text itself). ``--save FILE``
keeps the compiled classifier, and ``--load FILE`` in the place of FOLDER opens it: it needs nothing
but Penstock then, and compiles nothing.

Learning is counting: multinomial naive Bayes with one occurrence added to all (Laplace). The graph
cuts text into words (com.microsoft Tokenizer), counts those that it knows (TfIdfVectorizer), and
adds up the logarithms of their frequencies.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import penstock
from penstock.build import GraphBuilder
from penstock.ir.graph import Model

WORD = r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9\s]"
MOST_WORDS = 5_000  # those that occur most


def words(text: str) -> list[str]:
    """The words of a text, as the Tokenizer of the graph cuts it."""
    return re.findall(WORD, text, re.ASCII)


def learn(texts: Mapping[str, Sequence[str]]) -> Model:
    """A model of the classes in ``texts``: str[n] -> their names str[n] and probabilities."""
    counts = {
        name: Counter(w for text in some for w in words(text)) for name, some in texts.items()
    }
    known = [word for word, _ in sum(counts.values(), Counter()).most_common(MOST_WORDS)]
    occurrences = np.array([[count[word] + 1.0 for count in counts.values()] for word in known])
    frequencies = np.log(occurrences / occurrences.sum(axis=0))
    sizes = np.array([float(len(some)) for some in texts.values()])
    return classifier(list(texts), known, frequencies, np.log(sizes / sizes.sum()))


def classifier(
    classes: Sequence[str], known: Sequence[str], frequencies: np.ndarray, priors: np.ndarray
) -> Model:
    """The graph: ``frequencies`` are logarithms by word and class, ``priors`` by class."""
    b = GraphBuilder("classifier")
    text = b.input("text", str, ["n"])
    tokens = b.op(
        "Tokenizer", text, domain="com.microsoft", mark=0, mincharnum=1, pad_value="", tokenexp=WORD
    )
    counts = b.op(
        "TfIdfVectorizer",
        tokens,
        mode="TF",
        min_gram_length=1,
        max_gram_length=1,
        max_skip_count=0,
        ngram_counts=[0],
        ngram_indexes=list(range(len(known))),
        pool_strings=list(known),
    )
    scores = counts @ frequencies.astype(np.float32) + priors.astype(np.float32)
    names = b.constant(np.array(classes, object), str)
    b.output("class", b.op("Gather", names, b.op("ArgMax", scores, axis=-1, keepdims=0)))
    b.output("probabilities", b.op("Softmax", scores, axis=-1))
    return b.model()


def texts_of(folder: Path) -> dict[str, list[str]]:
    """The texts of each folder in a folder, by its name."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    texts = {f.name: [p.read_text(errors="replace") for p in sorted(f.iterdir())] for f in folders}
    if len(texts) < 2 or not all(texts.values()):
        raise SystemExit(f"{folder} must have a folder with text files for each of some classes")
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Classify texts.")
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of texts for each class")
    parser.add_argument("texts", nargs="*", help="files or texts to classify")
    parser.add_argument("--save", type=Path, help="keep the classifier in this file")
    parser.add_argument("--load", type=Path, help="a classifier that was kept")
    options = parser.parse_args(arguments)
    texts = options.texts
    if options.load:
        session = penstock.open(options.load)
        texts = [*([str(options.folder)] if options.folder else []), *texts]
    elif options.folder:
        session = penstock.compile(learn(texts_of(options.folder)))
    else:
        parser.error("give a folder to learn from, or --load")
    contents = [Path(t).read_text() if len(t) < 200 and Path(t).is_file() else t for t in texts]
    if contents:
        answers = session.run({"text": np.array(contents, object)})
        for text, name, row in zip(texts, *answers.values(), strict=True):
            print(f"{name} {row.max():.0%}  {text[:60]}")
    if options.save:
        session.save(options.save)


if __name__ == "__main__":
    main()
