"""Text embeddings by encoder models: tokens are fed to replicas, and the resulting rows are pooled.

::

    text ──> tokens ──> ids, mask ──> replicas ──> rows [tokens, width] ──> mean ──> length 1
                                              └──> vector [width], if the model pools itself
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DeadlineExceeded, InvalidInput
from penstock.core.types import NamedValues, TensorType
from penstock.serving.text_protocol import EmbeddingsAsked, FieldError, check_tokens

if TYPE_CHECKING:
    from penstock.generation.tokenizer import TextTokenizer
    from penstock.serving.replicas import Replicas
    from penstock.session.facts import Port

_POOLED = "sentence_embedding"
_ROWS = ("last_hidden_state", "token_embeddings")


class EmbeddingModel:
    """A served model that computes embeddings of texts, with its tokenizer. ``most``: the maximum
    tokens of a text, if known. ``by_first``: the row of the first token is the text's embedding."""

    def __init__(
        self,
        name: str,
        tokenizer: TextTokenizer,
        *,
        most: int | None = None,
        by_first: bool = False,
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.created = time()
        self._most, self._by_first = most, by_first

    async def vectors(
        self, asked: EmbeddingsAsked, replicas: Replicas, timeout: float, priority: int | None
    ) -> tuple[list[np.ndarray], int]:
        """Return the embeddings [width] of texts, normalized to length 1, and the number of tokens.
        Each text is a request to the replicas; at most as many are sent at a time as can run."""
        deadline = monotonic() + timeout
        interface = EncoderInterface(replicas)
        interface.check(asked.dimensions)
        tokens = await asyncio.to_thread(self._tokens, asked.texts)
        # Submitting all texts of a long request at once would fill the queue.
        room = asyncio.Semaphore(max(1, replicas.count * replicas.max_batch))

        async def vector(ids: list[int]) -> np.ndarray:
            async with room:
                left = deadline - monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the request did not end within its timeout of {timeout} s"
                    )
                run = replicas.submit(
                    interface.feeds(ids), [interface.output], timeout=left, priority=priority
                )
                outputs = await asyncio.wrap_future(run)
            return interface.pooled(outputs, self._by_first)

        tasks = [asyncio.ensure_future(vector(ids)) for ids in tokens]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # of one that has failed, the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return vectors, sum(map(len, tokens))

    def _tokens(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        tokens = [x if isinstance(x, list) else self.tokenizer.encode(x) for x in texts]
        for i, own in enumerate(tokens):
            check_tokens("input", own, self.tokenizer.size)
            if not own:
                raise FieldError("input", f"input[{i}] is empty")
            if self._most is not None and len(own) > self._most:
                raise FieldError(
                    "input",
                    f"input[{i}] has {len(own)} tokens, more than the {self._most} that the "
                    "model accepts",
                    "context_length_exceeded",
                )
        return tokens


class EncoderInterface:
    """The purposes of an encoder's inputs, and the output to pool. Raises ``InvalidInput`` for a
    model that is not an encoder."""

    def __init__(self, replicas: Replicas) -> None:
        session = replicas.session
        self._inputs = {port.name: _purpose(port) for port in session.inputs}
        purposes = [*self._inputs.values()]
        if purposes.count("ids") != 1 or "" in purposes:
            raise InvalidInput(
                f"the model computes no embeddings of texts: its inputs are {[*self._inputs]}, "
                "not tokens with an optional mask, types or positions"
            )
        self._dtypes = {port.name: _dtype(port) for port in session.inputs}
        self.output, self._width = _chosen(session.outputs)

    def check(self, dimensions: int | None) -> None:
        """Raise ``InvalidInput`` for a number of dimensions other than the model's."""
        if dimensions is not None and dimensions != self._width:
            width = "its own" if self._width is None else self._width
            raise FieldError(
                "dimensions",
                f"dimensions={dimensions}: embeddings of this model have {width} dimensions",
                "unsupported_value",
            )

    def feeds(self, ids: Sequence[int]) -> NamedValues:
        """Return the feeds of one text."""
        values: dict[str, object] = {
            "ids": ids,
            "mask": np.ones(len(ids)),
            "types": np.zeros(len(ids)),
            "positions": np.arange(len(ids)),
        }
        dtypes = self._dtypes
        return {n: np.array([values[of]], dtypes[n]) for n, of in self._inputs.items()}

    def pooled(self, outputs: NamedValues, by_first: bool) -> np.ndarray:
        """Return the embedding of one text, normalized to length 1."""
        # There are no padding rows: the replicas batch, pad and split again.
        rows = np.asarray(outputs[self.output], np.float32)[0]
        if rows.ndim > 1:
            rows = rows[0] if by_first else rows.mean(axis=0)
        return rows / max(float(np.linalg.norm(rows)), 1e-12)


def _dtype(port: Port) -> np.dtype:
    type_ = port.type
    return np.dtype(type_.dtype or np.int64) if isinstance(type_, TensorType) else np.dtype("i8")


def _purpose(port: Port) -> str:
    """Return the purpose of an input [texts, tokens]; "" if unknown."""
    name, type_ = port.name.lower(), port.type
    if not isinstance(type_, TensorType) or type_.dtype is None or len(type_.shape or (1, 1)) != 2:
        return ""
    for word, purpose in (("mask", "mask"), ("type", "types"), ("position", "positions")):
        if word in name:
            return purpose
    return "ids" if "id" in name and type_.dtype.kind == "i" else ""


def _chosen(ports: Sequence[Port]) -> tuple[str, int | None]:
    """Return the output with the embeddings, and their width if it is declared: a sentence
    embedding, an output with a row for each token, or else one with a row for each text."""
    shapes: dict[str, Sequence[object]] = {}
    for port in ports:
        type_ = port.type
        if isinstance(type_, TensorType) and type_.shape is not None:
            shapes[port.name] = type_.shape
    # BERT's "pooler_output" is made for another purpose: means of rows compare texts better.
    names = [_POOLED, *_ROWS]
    names += [name for name, shape in shapes.items() if len(shape) == 3]
    names += [name for name, shape in shapes.items() if len(shape) == 2]
    name = next((name for name in names if name in shapes), None)
    if name is None:
        raise InvalidInput(f"the model computes no text embeddings: its outputs are {[*shapes]}")
    width = shapes[name][-1]
    return name, width if isinstance(width, int) else None


def pools_first(path: Path) -> bool:
    """Whether the folder of a sentence-transformers model selects pooling by the first token."""
    folder = path if path.is_dir() else path.parent
    settings: object = {}
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    return isinstance(settings, Mapping) and bool(settings.get("pooling_mode_cls_token"))
