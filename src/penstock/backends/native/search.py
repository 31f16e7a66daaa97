"""Searches for sequences of tokens: functions of ``c/tables/search.c``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from struct import Struct

from penstock.backends.native import of_any_shape
from penstock.core.checkpoints import checkpoint
from penstock.core.types import Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel

_SETTINGS = Struct("=9q4d")  # as in c/tables/search.c


@of_any_shape("penstock.SearchEnd", "penstock.SearchStart", "penstock.SearchStep")
def search(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel:
    """A part of a search. C looks at the arrays of each call: what it has no code for, NumPy's
    function computes."""
    attrs = node.attrs
    flags = attrs["beam_search"], attrs["kind"] == "Sampling"
    tokens = (attrs[f"{name}_token_id"] for name in ("pad", "eos"))
    counts = (attrs.get(name, 0) for name in ("min_tokens_to_keep", "custom"))
    numbers = (attrs.get(name, 0.0) for name in ("top_p", "filter_value", "presence_penalty"))
    settings = _SETTINGS.pack(
        *(*flags, *tokens, attrs["early_stopping"], attrs["no_repeat_ngram_size"], *counts),
        *(len(node.outputs), attrs.get("temperature", math.nan), *numbers),
    )
    functions = {f"Search{name}": f"search_{name.lower()}" for name in ("End", "Start", "Step")}
    function = getattr(library.functions, functions[node.op.name])
    otherwise = node.op.compile(node, types).function
    return Kernel(partial(function, otherwise, checkpoint, settings))
