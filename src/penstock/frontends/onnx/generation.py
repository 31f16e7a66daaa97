"""GreedySearch, Sampling and BeamSearch of com.microsoft, as a Loop around their decoder.

::

    trips, samples, *state = SearchStart(ids, max_length, num_beams, mask)
    go_on, *state, *pasts = step(*state, *empty pasts)
    *state, *pasts = Loop(trips, go_on, *state, *pasts) { step }
    sequences, scores = SearchEnd(*state, ...)

    step:
        logits, *presents = decoder(ids, positions, mask, *pasts)
        go_on, beams, *state = SearchStep(logits, *state, ...)
        pasts = Gather(presents, beams)

The first step, over the whole input, precedes the loop, whose steps process one token each: all of
their shapes are known except for the lengths of the mask and of the pasts. ``init_decoder``
replaces ``decoder`` in the first step. An ``encoder`` runs before: the decoder reads the encoder's
caches of the input, repeated for each beam, and begins with a start token. An encoder that runs the
decoder once itself returns the logits of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple
from penstock.core.types import BOOL, FLOAT32, TensorType
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.onnx.messages import GraphProto, ValueInfoProto
from penstock.frontends.onnx.microsoft_rules import RULES
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.frontends.onnx.tensors import value_type
from penstock.ir.graph import Graph, Value, embed
from penstock.ir.op import AttrDict, Attrs
from penstock.ops.common.shape_rules import all_known
from penstock.ops.internal.search import STATE, STATE_TYPES
from penstock.ops.registry import MICROSOFT

_GREEDY = (
    *("ids", "max_length", "min_length", "repetition_penalty", "vocab_mask"),
    *("prefix_vocab_mask", "mask"),
)
_BEAMS = (
    *("ids", "max_length", "min_length", "num_beams", "num_return_sequences"),
    *("length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "mask"),
    *("forced_ids", "logits_processor"),
)
_INPUTS: Mapping[str, Sequence[str]] = {
    "GreedySearch": _GREEDY,
    "Sampling": (*_GREEDY, "presence_mask", "seed"),
    "BeamSearch": _BEAMS,
    "WhisperBeamSearch": (*_BEAMS, "cross_qk_layer_head", "extra_decoding_ids", "temperature"),
}
_WHISPER_TOKENS = (
    *("beginning_timestamp_token_id", "no_timestamps_token_id", "start_of_lm_token_id"),
    *("translate_token_id", "transcribe_token_id"),
)
_GPT, _T5, _WHISPER = range(3)  # the types of models
_OF_STEPS = (
    *("min_length", "length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"),
    *("temperature", "presence_mask", "seed", "logits_processor"),
)
_SAMPLING = {"temperature": 1.0, "top_p": 0.0, "filter_value": -1e20, "presence_penalty": 0.0} | {
    "min_tokens_to_keep": 0,
    "custom": 0,
}
Inputs = Mapping[str, Value | None]


class Decoding(NamedTuple):
    """A ``decoder`` and its ``contents``. ``begin`` creates the first pasts, whose beams lie along
    ``axis``, from the samples to which rows belong; ``arguments`` returns the decoder's inputs for
    the state and the pasts. ``first``: the decoder of the first step, or
    its outputs; None for a copy of ``decoder``."""

    decoder: Graph
    contents: GraphProto
    begin: Callable[[Value], list[Value]]
    arguments: Callable[[Sequence[Value], Sequence[Value]], list[Value]]
    axis: int
    first: Graph | Sequence[Value] | None


def search(old: NodeUpgrade) -> None:
    """Write a search as a Loop. Raises ``ConversionError`` for forms that are not supported."""
    names = _INPUTS[old.op]
    if len(old.inputs) > len(names):
        raise NodeError(f"has {len(old.inputs)} inputs, but must have {len(names)} at most")
    inputs = {name: old.optional(i) for i, name in enumerate(names)}
    if inputs["ids"] is None or inputs["max_length"] is None:
        raise NodeError("has no input_ids or no max_length; give it both")
    attrs = _attributes(old)
    model = attrs.pop("model_type")
    refused = ["cross_qk_layer_head", "extra_decoding_ids"]
    refused += ["forced_ids"] if model != _WHISPER else []
    refused += ["logits_processor"] if old.op != "WhisperBeamSearch" else []
    for name in refused:
        if inputs.get(name) is not None:
            raise InexpressibleError(f"its input {name!r} is not supported")
    if any(output is not None for output in old.outputs[3 if attrs["beam_search"] else 1 :]):
        raise InexpressibleError("its outputs other than sequences and scores are not supported")
    if model == _GPT:
        _search_alone(old, inputs, attrs)
    else:
        _search_encoded(old, inputs, attrs, masked=model == _T5)


def _attributes(old: NodeUpgrade) -> AttrDict:
    """Return the attributes of the steps, checked."""
    numbers: dict[str, Any] = dict.fromkeys(("no_repeat_ngram_size", "early_stopping"), 0)
    whisper = old.op == "WhisperBeamSearch"
    numbers |= {"model_type": _WHISPER if whisper else _GPT, "decoder_start_token_id": -1}
    numbers |= dict.fromkeys(_WHISPER_TOKENS if whisper else (), -1)
    numbers |= {key: old.attrs.get(key) for key in ("eos_token_id", "pad_token_id")}
    numbers |= {key: old.attrs[key] for key in numbers if key in old.attrs}
    for key, number in numbers.items():
        if not isinstance(number, int) or abs(number) >= 2**31:
            raise NodeError(f"has {key} {number!r}, which must be an integer of 32 bits")
    models = {"BeamSearch": (_GPT, _T5, _WHISPER), "WhisperBeamSearch": (_WHISPER,)}
    if numbers["model_type"] not in models.get(old.op, (_GPT,)):
        raise InexpressibleError(f"models of type {numbers['model_type']} are not supported")
    for key, default in _SAMPLING.items() if old.op == "Sampling" else ():
        numbers[key] = old.attrs.get(key, default)
        if not isinstance(numbers[key], type(default)):
            raise NodeError(f"has {key} {numbers[key]!r}, which must be like {default}")
    return numbers | {"kind": old.op, "beam_search": old.op.endswith("BeamSearch")}


def _graph(old: NodeUpgrade, key: str) -> tuple[Graph, GraphProto]:
    """Return a graph attribute, which is empty until it is imported, and its contents."""
    graph = old.attrs.get(key)
    if not isinstance(graph, Graph):
        raise NodeError(f"has no graph {key!r}; give it one")
    return graph, old.contents(graph)


def _type_of(info: ValueInfoProto) -> TensorType:
    """Return the declared type of an input or output of a graph."""
    try:
        type_ = value_type(info.type, entry=True)
    except InvalidModel as error:
        raise NodeError(f"has a graph with {info.name!r}: {error}") from error
    return type_ if isinstance(type_, TensorType) else TensorType()


def _search_alone(old: NodeUpgrade, inputs: Inputs, attrs: AttrDict) -> None:
    """Write a search without an encoder, in which the decoder continues the input."""
    decoder, contents = _graph(old, "decoder")
    first = _graph(old, "init_decoder") if "init_decoder" in old.attrs else None
    pasts = [_type_of(info) for info in contents.input[3:]]
    if not pasts or len(contents.output) != 1 + len(pasts):
        raise InexpressibleError(
            "its decoder must take input_ids, position_ids, attention_mask and past states, and "
            "return logits and a present state for each of the past"
        )
    if first is not None and [_type_of(info) for info in first[1].input[3:]] != pasts:
        raise InexpressibleError("its decoder and init_decoder have different inputs")

    def begin(samples: Value) -> list[Value]:
        return [_empty(old, past, samples, 1) for past in pasts]

    def arguments(state: Sequence[Value], before: Sequence[Value]) -> list[Value]:
        return [*state[:3], *before]

    decoding = Decoding(decoder, contents, begin, arguments, 1, None if first is None else first[0])
    _emit(old, inputs, attrs, inputs["ids"], inputs["mask"], decoding)


def _search_encoded(old: NodeUpgrade, inputs: Inputs, attrs: AttrDict, masked: bool) -> None:
    """Write a search that begins with a start token, and whose encoder reads the input; ``masked``:
    with a mask of the input."""
    encoder, encoding = _graph(old, "encoder")
    decoder, contents = _graph(old, "decoder")
    ids, mask, start = inputs["ids"], inputs["mask"], attrs["decoder_start_token_id"]
    assert ids is not None
    if masked and mask is None:  # tokens count from the first one that is not padding
        padding = old.emit("Equal", [ids, old.like(attrs["pad_token_id"], ids)])
        words = old.cast(old.emit("Not", [padding]), "int32")
        count = old.emit("CumSum", [words, 1])
        mask = old.cast(old.cast(count, "bool"), "int32")
    begin = inputs["forced_ids"]
    if begin is None:
        ones = old.emit("Concat", [old.emit("Shape", [ids], start=0, end=1), [1]], axis=0)
        begin = old.emit("ConstantOfShape", [ones], value=np.array([start], np.int32))
    masks = [mask] if masked and mask is not None else []
    of_decoder = len(encoding.input) == 2 + len(masks)  # it runs the decoder on the first tokens
    encoded = _called(old, encoder, encoding, [ids, *masks, begin][: len(encoding.input)])
    layers = len(contents.output) - 1
    other = len(contents.input) - 2 * layers  # ids, mask, hidden states
    hidden = other - 1 - len(masks)  # decoders may also read the encoder's hidden states
    if (
        layers < 1
        or hidden not in (0, 1)
        or len(encoded) != (2 + 2 * layers if of_decoder else layers)
    ):
        raise InexpressibleError(
            "its decoder must take input_ids, encoder_attention_mask (of T5), past states of its "
            "own and of the input, and return logits and its own present states"
        )
    tokens = _type_of(contents.input[0]).shape
    whole = tokens is None or len(tokens) != 2 or tokens[1] != 1  # it needs all tokens so far
    read: list[Value] = []

    def repeated(samples: Value) -> list[Value]:
        """Repeat the encoder's outputs for each beam; return the first pasts of the decoder."""
        own = encoded[2 : 2 + layers] if of_decoder else []
        rest = [*masks, *(encoded[1:2] if hidden else ()), *encoded[-layers:]]
        both = [old.emit("Gather", [x, samples], axis=0) for x in (*own, *rest)]
        read.extend(both[len(own) :])
        own = both[: len(own)]
        pasts = contents.input[other : other + layers]
        return own or [_empty(old, _type_of(info), samples, 0) for info in pasts]

    def arguments(state: Sequence[Value], before: Sequence[Value]) -> list[Value]:
        return [state[3 if whole else 0], *read[:-layers], *before, *read[-layers:]]

    first = encoded[:1] if of_decoder else None
    decoding = Decoding(decoder, contents, repeated, arguments, 0, first)
    _emit(old, inputs, attrs, begin, None, decoding)


def _empty(old: NodeUpgrade, past: TensorType, samples: Value, axis: int) -> Value:
    """Return a cache [..., samples at ``axis``, heads, positions, size] of no positions."""
    dims = past.shape
    if dims is None or len(dims) != axis + 4:
        raise InexpressibleError(f"its decoder's past state has not {axis + 4} dims, but {dims}")
    fixed = all_known([*dims[:axis], dims[axis + 1], dims[axis + 3]])
    if fixed is None:
        raise InexpressibleError("its decoder's past states have no heads of known size")
    rows = old.emit("Shape", [samples])
    parts = [*([fixed[:axis]] if axis else ()), rows, [fixed[-2], 0, fixed[-1]]]
    shape = old.emit("Concat", parts, axis=0)
    return old.emit("ConstantOfShape", [shape], value=np.zeros(1, past.dtype))


def _called(
    b: NodeUpgrade, graph: Graph, contents: GraphProto, arguments: Sequence[Value]
) -> list[Value]:
    """Return the outputs of a graph attribute for ``arguments``, as the branch of an If that is
    always taken, since branches can read outer values."""
    graph.inputs = list(arguments)  # they replace its own when its contents are imported
    types = [_type_of(info) for info in contents.output]
    unused = [np.zeros((1,) * len(t.shape or ()), t.dtype or FLOAT32) for t in types]
    other = Graph([], [b.constant(x, x.dtype) for x in unused], [], "unused")
    # Rules read declared types until inference replaces them.
    outputs = [Value(b.fresh("decoded"), t) for t in types]
    branches = {"then_branch": graph, "else_branch": other}
    b.become("If", [b.constant(True, BOOL)], branches, outputs)
    return outputs


def _emit(
    old: NodeUpgrade,
    inputs: Inputs,
    attrs: Attrs,
    ids: Value | None,
    mask: Value | None,
    decoding: Decoding,
) -> None:
    """Emit the loop and the nodes around it. ``ids`` are the first tokens."""
    start = [ids, inputs["max_length"], inputs.get("num_beams"), mask]
    trips, samples, *begun = old.emit_several(
        "SearchStart", start, attrs, count=2 + STATE, domain="penstock"
    )
    inner = NodeUpgrade(
        old.name, [], old.outputs, {}, types=old.types, unique=old.unique, origin=old.origin
    )
    decoder, contents = decoding.decoder, decoding.contents
    shown = attrs["beam_search"] and len(old.outputs) > 2

    def step(
        b: NodeUpgrade, decoded: Sequence[Value], state: Sequence[Value]
    ) -> tuple[list[Value], Value]:
        """Return whether to continue, the next state and pasts, and scores."""
        logits, *presents = decoded
        arguments = [logits, *state, ids, *(inputs.get(name) for name in _OF_STEPS)]
        results = b.emit_several("SearchStep", arguments, attrs, count=3 + STATE, domain="penstock")
        go_on, beams, scores, *state = results
        if attrs["beam_search"]:
            presents = [b.emit("Gather", [x, beams], axis=decoding.axis) for x in presents]
        return [go_on, *state, *presents], scores

    pasts = decoding.begin(samples)
    iteration, condition = Value(inner.fresh("iteration")), Value(inner.fresh("condition"))
    state = [Value(inner.fresh("state"), type_) for type_ in STATE_TYPES]
    before = [Value(inner.fresh("past")) for _ in pasts]
    of_steps, of_first = (decoding.arguments(*x) for x in ((state, before), (begun, pasts)))
    if isinstance(decoding.first, Sequence):
        decoded = [*decoding.first, *pasts]
    else:
        graph = decoding.first
        if graph is None:
            graph = Graph([], [], [], "the first step")
            old.when_imported(partial(_copy, decoder, of_steps, graph, of_first))
        decoded = _called(old, graph, contents, of_first)
    carried, first_scores = step(old, decoded, begun)
    outputs, scores = step(inner, _called(inner, decoder, contents, of_steps), state)
    outputs += [scores] if shown else []
    body = Graph(
        [iteration, condition, *state, *before], outputs, inner.nodes, f"{old.name}, a step"
    )
    results = [Value(old.fresh("state")) for _ in outputs[1:]]
    old.become("Loop", [trips, *carried], {"body": body}, results)
    final = [inputs.get("length_penalty"), inputs.get("num_return_sequences")]
    final += [first_scores, results[-1] if shown else None, ids]
    old.emit_final("SearchEnd", [*results[3:STATE], *final], attrs, domain="penstock")


def _copy(source: Graph, own: Sequence[Value], target: Graph, arguments: Sequence[Value]) -> None:
    """Make ``target`` a copy of ``source`` that reads ``arguments`` in place of its ``own``."""
    whole = Graph(own, source.outputs, source.nodes)
    target.inputs = []
    target.nodes, target.outputs = embed(whole, arguments, "/first")


RULES.update(((MICROSOFT, name), search) for name in _INPUTS)
