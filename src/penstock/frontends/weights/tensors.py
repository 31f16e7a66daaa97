"""The tensors of files of weights, by name, which are read when a graph uses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, quoted
from penstock.core.records import dataclass, field
from penstock.core.shared_arrays import let_pages_go
from penstock.core.types import FLOAT32, dtype_named
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes
from penstock.frontends.common.weight_file import ConstantBudget, WeightFile
from penstock.frontends.weights.block_codes import FORMATS, BlockCodes, decode
from penstock.frontends.weights.settings import unsupported

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""dtypes by their names in files"""

# Entries of checkpoints that no graph reads: buffers that follow from the configuration, and heads
# of other tasks.
_UNREAD = re.compile(
    r"rotary_emb\.|\.attn\.(masked_)?bias$|position_ids$|pooler\.|^cls\.|lm_head\.|classifier\.|"
    r"^head\.(dense|norm)\.|^decoder\.bias$|^vocab_|qa_outputs\.|score\.|predictions\.|vision_|"
    r"multi_modal_projector\."
)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a file. ``format`` is the name of its element type in the file, of ``PLAIN`` or
    ``FORMATS``; ``file`` the name of the file in messages."""

    name: str
    shape: tuple[int, ...]
    format: str
    file: str
    source: WeightFile
    offset: int
    nbytes: int

    @property
    def label(self) -> str:
        return f"tensor {quoted(self.name)} of {self.file}"

    @property
    def is_packed(self) -> bool:
        """Whether it has blocks of codes instead of numbers."""
        return self.format in FORMATS

    def bytes(self) -> np.ndarray:
        checkpoint()
        try:
            return self.source.read(self.offset, self.nbytes)
        except ValueError as error:
            raise InvalidModel(f"{self.file} cannot be read: {error}") from error

    def array(self) -> np.ndarray:
        """Return the elements as they are stored, read-only; those of blocks as float32."""
        if self.is_packed:
            return self.codes().dequantized().reshape(self.shape)
        return array_from_bytes(self.bytes(), dtype_named(PLAIN[self.format])).reshape(self.shape)

    def real(self) -> np.ndarray:
        """Return the elements as float32."""
        return self.array().astype(FLOAT32, copy=False)

    def codes(self) -> BlockCodes:
        """Return the blocks of codes along the last axis; the other axes are rows."""
        data = self.bytes()
        codes = decode(self.format, data, self.shape[-1])
        let_pages_go(data)
        return codes


@dataclass(eq=False)
class TensorStore:
    """The tensors of a model. ``label`` names the model in messages. A graph requests tensors by
    their names in GGUF, which ``file_name`` maps to those of the files."""

    label: str
    tensors: Mapping[str, StoredTensor]
    budget: ConstantBudget
    file_name: Callable[[str], str] = str
    _read: set[str] = field(default_factory=set, init=False)

    def __contains__(self, name: str) -> bool:
        return self.file_name(name) in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def get(self, name: str, shape: Sequence[int]) -> StoredTensor:
        """Return a tensor of this shape. Raises ``InvalidModel``, ``Unsupported``."""
        tensor = self._tensor(name)
        if tensor.shape != tuple(shape):
            raise InvalidModel(
                f"{tensor.label} has shape {list(tensor.shape)}, but by the configuration it has "
                f"{list(shape)}; get both from one place"
            )
        if tensor.format not in PLAIN and not tensor.is_packed:
            known = ", ".join((*PLAIN, *FORMATS))
            advice = f"{known} are; convert the model to one of these"
            raise unsupported(f"type {tensor.format}", advice, tensor.label)
        if tensor.file + tensor.name not in self._read:
            self._read.add(tensor.file + tensor.name)
            try:
                self.budget.count(tensor.shape, FLOAT32)
                self.budget.spend(tensor.nbytes)
            except TensorError as error:
                raise InvalidModel(f"{tensor.label}: {error}") from error
        return tensor

    def _tensor(self, name: str) -> StoredTensor:
        own = self.file_name(name)
        tensor = self.tensors.get(own)
        if tensor is None:
            raise InvalidModel(
                f"{self.label} has no tensor {quoted(own)}, which its architecture needs; get all "
                "files of the model, or another copy of it"
            )
        return tensor

    def check_all_read(self) -> None:
        """Raise ``Unsupported`` if there are parameters that the graph does not read, since it
        would compute something other than the model."""
        unread = [
            tensor
            for tensor in self.tensors.values()
            if tensor.file + tensor.name not in self._read and not _UNREAD.search(tensor.name)
        ]
        if unread:
            more = f" and {len(unread) - 1} others" if len(unread) > 1 else ""
            raise unsupported(
                f"a variant of its architecture with a tensor {quoted(unread[0].name)}{more}",
                "the graph would not read it; export the model to ONNX",
                unread[0].file,
            )
