"""Text that a decoder continues, token by token, through Penstock.

``python examples/generate.py MODEL.onnx tokenizer.json PROMPT`` writes what follows the prompt.
The model takes ``input_ids`` and caches ``past...``, perhaps ``attention_mask`` and
``position_ids``, and returns logits and caches ``present...`` in the same order, as exporters of
Hugging Face's models write GPT-2, Llama, Qwen and others. The tokenizer is the file beside such
models, of byte pairs that are divided as GPT-2 does.

Each step is fed the caches that the one before returned. After a few steps Penstock adds its rows
to them where they lie, so that a step costs the same however long the text is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import penstock

# As GPT-2 divides text: what is cut off of words, letters, digits, other signs, and spaces, each
# with a space in front. Letters and digits are those of Python's ``re``.
WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def letters_of_bytes() -> list[str]:
    """The letter by which files spell each byte: itself if it is printed, else one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


class Tokenizer:
    """Byte pairs that are joined to tokens, in the order in which the file lists them."""

    def __init__(self, path: str | Path) -> None:
        file = json.loads(Path(path).read_text(encoding="utf-8"))
        model, division = file["model"], file.get("pre_tokenizer") or {}
        if model.get("type", "BPE") != "BPE" or division.get("type") != "ByteLevel":
            raise ValueError(f"{path} is no tokenizer of byte pairs, as GPT-2 has it")
        pairs = [tuple(p.split(" ")) if isinstance(p, str) else tuple(p) for p in model["merges"]]
        self._rank = {pair: rank for rank, pair in enumerate(pairs)}
        self._id: dict[str, int] = model["vocab"]
        self._special = {t["content"]: t["id"] for t in file.get("added_tokens", ())}
        self._prefix = " " if division.get("add_prefix_space") else ""
        self._letters = letters_of_bytes()
        self._bytes = {letter: byte for byte, letter in enumerate(self._letters)}
        self._text = {i: token for token, i in self._id.items()}
        self.ends = set(self._special.values())
        """tokens that are no text, such as the one that ends it"""

    def encode(self, text: str) -> list[int]:
        ids = []
        text = text if text.startswith(" ") else self._prefix + text
        for word in WORDS.findall(text):
            ids += [self._id[part] for part in self._joined(word)]
        return ids

    def _joined(self, word: str) -> list[str]:
        """The tokens of a word: the pair that is listed first is joined, again and again."""
        parts = [self._letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._rank.get(pair, len(self._rank)) for pair in zip(parts, parts[1:])]  # noqa: B905, RUF007
            best = min(ranks)
            if best == len(self._rank):
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of some tokens, which need not be whole letters. Networks may have more tokens
        than there is text for."""
        letters = "".join([self._text.get(i, "") for i in ids if i not in self.ends])
        return bytes([self._bytes[letter] for letter in letters])


class Decoder:
    """A session of a decoder with a cache."""

    def __init__(self, session: penstock.Session) -> None:
        self._session = session
        self._inputs = {port.name: port.type for port in session.inputs}
        outputs = [port.name for port in session.outputs]
        pasts = [name for name in self._inputs if name.startswith("past")]
        presents = [name for name in outputs if name.startswith("present")]
        if "input_ids" not in self._inputs or not pasts or len(pasts) != len(presents):
            raise ValueError("the model is no decoder: it needs input_ids, past... and present...")
        self._logits = next(name for name in outputs if name not in presents)
        self._presents = dict(zip(pasts, presents, strict=True))

    def empty(self) -> dict[str, np.ndarray]:
        """Caches of no positions for one sequence."""
        caches = {}
        for name in self._presents:
            type_ = self._inputs[name]
            dims = [
                dim if isinstance(dim, int) else int(axis == 0)
                for axis, dim in enumerate(type_.shape)
            ]
            caches[name] = np.zeros(dims, type_.dtype)
        return caches

    def step(
        self, ids: Sequence[int], before: int, caches: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The logits of the token behind ``ids``, which come after ``before`` others, and the
        caches with theirs."""
        total = before + len(ids)
        given = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(before, total)[None],
        }
        feeds = {name: array for name, array in given.items() if name in self._inputs}
        outputs = self._session.run({**feeds, **caches})
        logits = outputs[self._logits][0, -1]
        return logits, {past: outputs[name] for past, name in self._presents.items()}

    def generate(
        self, prompt: Sequence[int], most: int, ends: set[int], choose: Choice
    ) -> Iterator[int]:
        """At most ``most`` tokens behind ``prompt``, until one of ``ends`` comes."""
        ids, before, caches = list(prompt), 0, self.empty()
        for _ in range(most):
            logits, caches = self.step(ids, before, caches)
            before += len(ids)
            ids = [choose(logits)]
            if ids[0] in ends:
                return
            yield ids[0]


class Choice:
    """Chooses a token: the likeliest at ``temperature`` 0, else one of the ``best`` at random."""

    def __init__(self, temperature: float = 0.0, best: int = 50, seed: int = 0) -> None:
        self.temperature, self.best = temperature, best
        self.rng = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray) -> int:
        if not self.temperature:
            return int(logits.argmax())
        likeliest = np.argpartition(-logits, min(self.best, logits.size) - 1)[: self.best]
        scores = logits[likeliest].astype(np.float64) / self.temperature
        parts = np.exp(scores - scores.max())
        return int(self.rng.choice(likeliest, p=parts / parts.sum()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("tokenizer", help="its tokenizer.json")
    parser.add_argument("prompt")
    parser.add_argument("--most", type=int, default=100, help="tokens; 100 by default")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 by default: no chance")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer(options.tokenizer)
    decoder = Decoder(penstock.compile(options.model))
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        parser.error("the prompt is empty")
    choose = Choice(options.temperature, seed=options.seed)
    count, begin = 0, time.perf_counter()
    print(options.prompt, end="", flush=True)
    for token in decoder.generate(prompt, options.most, tokenizer.ends, choose):
        sys.stdout.buffer.write(tokenizer.decode([token]))
        sys.stdout.flush()
        count += 1
    seconds = time.perf_counter() - begin
    print(f"\n{count} tokens, {count / seconds:.1f} a second", file=sys.stderr)


if __name__ == "__main__":
    main()
