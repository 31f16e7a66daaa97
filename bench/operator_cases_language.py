"""Cases of ``bench.operators``: attention, tokens and texts, and searches that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bench.operator_cases import Dims, Draw, Held, Node, int32, operator_case

STEPS = 64  # runs in which a cache is fed back

# Attention: lengths, heads and the features of one.


@operator_case("Attention", (4, 2, 8), (32, 4, 32), (128, 12, 64))
def attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    width = heads * size
    weights = [draw.weights(width, 3 * width, inner=width), draw.weights(3 * width)]
    return Node([draw.real(1, length, width), *weights], {"num_heads": heads})


@operator_case("Attention", (4, 2, 8), (32, 4, 32), (128, 12, 64), form="unidirectional")
def causal_attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    node = attention(draw, length, heads, size)
    return Node(node.inputs, {**node.attrs, "unidirectional": 1})


@operator_case("Attention", (16, 2, 8), (256, 4, 64), (1024, 12, 64), form="step, past")
def attention_step(draw: Draw, past: int, heads: int, size: int) -> Node:
    fed = causal_attention(draw, 1, heads, size)
    inputs = [*fed.inputs, None, draw.real(2, 1, heads, past, size)]
    return Node(inputs, fed.attrs, 2)


@operator_case("Attention", (16, 2, 8), (256, 4, 64), (1024, 12, 64), form="step, fed back")
def attention_fed_back(draw: Draw, past: int, heads: int, size: int) -> Node:
    step = attention_step(draw, past, heads, size)
    return Node(step.inputs, step.attrs, 2, {4: 1}, STEPS)


@operator_case("QAttention", (4, 2, 8), (32, 4, 32), (128, 12, 64))
def quantized_attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    width = heads * size
    x, w = draw.codes(1, length, width), draw.held_codes(width, 3 * width)
    fixed = [draw.weights(3 * width), draw.scales(), draw.scales(low=0.1 / width)]
    zeros = [Held(np.array(128, np.uint8)), Held(np.array(0, np.int8))]
    return Node([x, w, *fixed, None, *zeros], {"num_heads": heads})


@operator_case("MultiHeadAttention", (4, 2, 8), (32, 4, 32), (256, 12, 64))
def multi_head_attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    parts = [draw.real(1, length, heads * size) for _ in range(3)]
    mask = np.ones((1, length), np.int32)
    bias = draw.weights(3 * heads * size)
    return Node([*parts, bias, mask], {"num_heads": heads})


@operator_case("MultiHeadAttention", (4, 2, 8), (32, 4, 32), (256, 12, 64), form="unidirectional")
def causal_multi_head_attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    parts = [draw.real(1, length, heads * size) for _ in range(3)]
    return Node(parts, {"num_heads": heads, "unidirectional": 1})


@operator_case("MultiHeadAttention", (16, 2, 8), (256, 8, 64), (1500, 20, 64), form="cross, step")
def cross_attention(draw: Draw, keys: int, heads: int, size: int) -> Node:
    """Keys and values are those of an encoder, in heads."""
    encoded = [draw.real(1, heads, keys, size) for _ in range(2)]
    return Node([draw.real(1, 1, heads * size), *encoded], {"num_heads": heads})


CACHED = (16, 2, 8), (128, 8, 64), (1024, 16, 64)


@operator_case("MultiHeadAttention", *CACHED, form="step, past")
def multi_head_attention_step(draw: Draw, past: int, heads: int, size: int) -> Node:
    parts = [draw.real(1, 1, heads * size) for _ in range(3)]
    caches = [draw.real(1, heads, past, size) for _ in range(2)]
    attrs = {"num_heads": heads, "unidirectional": 1}
    return Node([*parts, None, None, None, *caches], attrs, 3)


@operator_case("MultiHeadAttention", *CACHED, form="fed back")
def multi_head_attention_fed_back(draw: Draw, past: int, heads: int, size: int) -> Node:
    step = multi_head_attention_step(draw, past, heads, size)
    return Node(step.inputs, step.attrs, 3, {6: 1, 7: 2}, STEPS)


@operator_case("DecoderMaskedMultiHeadAttention", *CACHED)
def decoder_attention(draw: Draw, room: int, heads: int, size: int) -> Node:
    """A step in a buffer that is filled but for its last quarter."""
    parts = [draw.real(1, 1, heads * size) for _ in range(3)]
    caches = [draw.real(1, heads, room, size) for _ in range(2)]
    rest = [int32(room * 3 // 4), None, None, draw.weights(3 * heads * size)]
    attrs = {"num_heads": heads, "past_present_share_buffer": 1}
    return Node([*parts, None, None, *caches, *rest], attrs, 3)


def _group_query(draw: Draw, length: int, past: int, heads: Dims, packed: bool = False) -> Node:
    """``length`` positions after ``past`` others, with rotary angles. ``heads``: how many there
    are of queries and of keys, and the features of one."""
    queries, keys, size = heads
    parts: list[Any] = [draw.real(1, length, n * size) for n in (queries, keys, keys)]
    if packed:
        parts = [np.concatenate(parts, -1), None, None]
    caches: list[Any] = [draw.real(1, keys, past, size) if past else None for _ in range(2)]
    total = past + length
    angles = draw.rng.uniform(0, 6, (total + 256, size // 2))
    tables = [Held(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    attrs = {"num_heads": queries, "kv_num_heads": keys, "do_rotary": 1}
    return Node([*parts, *caches, int32(total - 1), int32(total), *tables], attrs, 3)


PROMPTS = (4, 4, 2, 16), (64, 4, 2, 32), (512, 4, 2, 64)
GROUPED = (16, 4, 2, 16), (128, 8, 2, 64), (1024, 32, 8, 128)


@operator_case("GroupQueryAttention", *PROMPTS, form="prompt")
def group_query_prompt(draw: Draw, length: int, *heads: int) -> Node:
    return _group_query(draw, length, 0, heads)


@operator_case("GroupQueryAttention", *PROMPTS, form="prompt, packed")
def group_query_packed(draw: Draw, length: int, *heads: int) -> Node:
    return _group_query(draw, length, 0, heads, packed=True)


@operator_case("GroupQueryAttention", *GROUPED, form="step")
def group_query_step(draw: Draw, past: int, *heads: int) -> Node:
    return _group_query(draw, 1, past, heads)


@operator_case("GroupQueryAttention", *GROUPED, form="step, packed")
def group_query_packed_step(draw: Draw, past: int, *heads: int) -> Node:
    return _group_query(draw, 1, past, heads, packed=True)


@operator_case("GroupQueryAttention", *GROUPED, form="step in a buffer")
def group_query_buffer(draw: Draw, past: int, *heads: int) -> Node:
    """The present has the dims of the past, of which the last quarter is free."""
    node = _group_query(draw, 1, past, heads)
    length = past * 3 // 4 + 1
    lengths = [int32(length - 1), int32(length)]
    return Node([*node.inputs[:5], *lengths, *node.inputs[7:]], node.attrs, 3)


@operator_case("GroupQueryAttention", *GROUPED, form="fed back")
def group_query_fed_back(draw: Draw, past: int, *heads: int) -> Node:
    node = _group_query(draw, 1, past, heads)
    return Node(node.inputs, node.attrs, 3, {3: 1, 4: 2}, STEPS, counted=(5, 6))


@operator_case("GroupQueryAttention", *GROUPED, form="shared buffer")
def group_query_shared_buffer(draw: Draw, past: int, *heads: int) -> Node:
    node = group_query_buffer(draw, past + 4 * STEPS, *heads)
    fed_back = {3: 1, 4: 2}
    return Node(node.inputs, node.attrs, 3, fed_back, STEPS, counted=(5, 6), bound=True)


@operator_case("SparseAttention", (16, 2, 1, 16), (64, 4, 2, 32), (256, 8, 4, 64))
def sparse_attention(draw: Draw, length: int, *heads: int) -> Node:
    """A prompt in blocks of 16, of which each sees itself and the two before."""
    node = _group_query(draw, length, length, heads)
    blocks = length // 16
    seen = [range(max(0, row - 2), row + 1) for row in range(blocks)]
    ends = np.cumsum([0, *map(len, seen)])[None].astype(np.int32)
    columns = int32(*(column for row in seen for column in row))[None]
    attrs = {**node.attrs, "sparse_block_size": 16}
    lengths = [int32(length), int32(length)]
    inputs = [*node.inputs[:5], ends, columns, *lengths, *node.inputs[7:]]
    return Node(inputs, attrs, 3, {3: 1, 4: 2}, bound=True)


@operator_case("RotaryEmbedding", (1, 2, 16), (96, 12, 64), (1024, 32, 128))
def rotary_embedding(draw: Draw, length: int, heads: int, size: int) -> Node:
    tables = [draw.weights(length, size // 2) for _ in range(2)]
    return Node([draw.real(1, length, heads * size), np.arange(length)[None], *tables])


@operator_case("MRotaryEmbedding", (1, 2, 16), (32, 12, 64), (512, 32, 128))
def rotary_embedding_of_images(draw: Draw, length: int, heads: int, size: int) -> Node:
    """Positions in time, height and width."""
    tables = [draw.weights(length, size // 2) for _ in range(2)]
    positions = draw.whole(length, 3, 1, length)
    section = [size // 4, size // 8, size // 8]
    attrs = {"mrope_section": section, "num_heads": heads}
    return Node([draw.real(1, length, heads * size), positions, *tables], attrs)


LINEAR = (4, 2, 8), (32, 4, 32), (128, 16, 64)
LINEAR_STEPS = (1, 2, 8), (1, 16, 64), (1, 32, 128)


@operator_case("LinearAttention", *LINEAR, form="prompt")
@operator_case("LinearAttention", *LINEAR_STEPS, form="step")
def linear_attention(draw: Draw, length: int, heads: int, size: int) -> Node:
    parts = [draw.real(1, length, heads * size) for _ in range(3)]
    parts[1] /= np.float32(size)  # or states grow without end
    decay, beta = (draw.rng.uniform(0, 1, (1, length, heads)).astype(np.float32) for _ in "ab")
    inputs = [*parts, draw.real(1, heads, size, size), -decay, beta]
    attrs = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"}
    return Node(inputs, attrs, 2)


# Tokens and texts.


@operator_case("BifurcationDetector", (32,), (4096,), (65_536,))
def bifurcation_detector(draw: Draw, length: int) -> Node:
    """The prediction is right up to half of the rest of the source."""
    source, start = draw.whole(1000, length), np.array([length // 4])
    predicted = np.append(source[start[0] :], 1)
    predicted[length // 2] = 1000
    return Node([source, draw.whole(1000, 8), start, predicted], outputs=2)


@operator_case("NGramRepeatBlock", (1, 16, 64), (16, 512, 4096), (16, 1024, 50_000))
def ngram_repeat_block(draw: Draw, beams: int, length: int, words: int) -> Node:
    return Node([draw.whole(64, beams, length), draw.real(beams, words)], {"ngram_size": 3})


HASHED = {"pad_id": 0, "max_ngram_size": 3, "n_head_per_ngram": 4}


def _hash_tables(draw: Draw) -> list[Held]:
    return [Held(draw.whole(2**31, 3)), Held(1000 + draw.whole(1000, 8))]


@operator_case("NGramHashMapping", (1, 4), (2, 512), (16, 2048))
def ngram_hash_mapping(draw: Draw, batch: int, length: int) -> Node:
    return Node([draw.whole(1000, batch, length), *_hash_tables(draw)], HASHED, 2)


@operator_case("VarlenNGramHashMapping", (1, 4), (2, 512), (16, 2048))
def varlen_ngram_hash_mapping(draw: Draw, batch: int, length: int) -> Node:
    ends = np.arange(0, batch * length + 1, length).astype(np.int32)
    inputs = [draw.whole(1000, batch * length), *_hash_tables(draw), ends]
    return Node(inputs, HASHED, [True, True])


@operator_case("Tokenizer", (1, 2), (16, 8), (64, 64))
def tokenizer(draw: Draw, lines: int, words: int) -> Node:
    attrs = {"separators": [" "], "mark": 0, "pad_value": "#", "mincharnum": 1}
    return Node([draw.texts(lines, words)], attrs)


@operator_case("Tokenizer", (1, 2), (16, 8), (64, 64), form="expression")
def expression_tokenizer(draw: Draw, lines: int, words: int) -> Node:
    attrs = {"tokenexp": "[a-z]+", "mark": 0, "pad_value": "#", "mincharnum": 1}
    return Node([draw.texts(lines, words)], attrs)


@operator_case("MurmurHash3", (4,), (4096,), (200_000,))
def murmur_hash(draw: Draw, count: int) -> Node:
    return Node([draw.whole(2**31, count)])


@operator_case("MurmurHash3", (4,), (512,), (20_000,), form="texts")
def murmur_hash_of_texts(draw: Draw, count: int) -> Node:
    return Node([draw.texts(count, 1)])


# Searches: words, heads, features of one, and steps. Their decoders have one layer.

SEARCHES = (16, 1, 8, 2), (64, 2, 16, 4), (512, 4, 64, 8)
_GPT = """decoder (int32[b, s] input_ids, int32[b, s] position_ids, int32[b, t] attention_mask,
    float[2, b, {heads}, p, {size}] past_0)
    => (float[b, s, {words}] logits, float[2, b, {heads}, t, {size}] present_0) {{
    word = Gather (table, input_ids)
    place = Gather (places, position_ids)
    x = Add (word, place)
    y, present_0 = com.microsoft.Attention <num_heads = {heads}, unidirectional = 1>
        (x, weights, bias, attention_mask, past_0)
    z = Add (x, y)
    logits = MatMul (z, out) }}"""
_WHISPER = {
    "encoder": """encoder (float[b, 6, e] encoder_input_ids, int32[b, s] decoder_input_ids)
    => (float[b, s, {words}] logits, float[b, e, {width}] encoder_hidden_states,
        float[b, {heads}, s, {size}] present_key_self_0,
        float[b, {heads}, s, {size}] present_value_self_0,
        float[b, {heads}, e, {size}] present_key_cross_0,
        float[b, {heads}, e, {size}] present_value_cross_0) {{
    frames = Transpose <perm = [0, 2, 1]> (encoder_input_ids)
    encoder_hidden_states = MatMul (frames, features)
    ck = MatMul (encoder_hidden_states, wk) cks = Reshape (ck, split)
    present_key_cross_0 = Transpose <perm = [0, 2, 1, 3]> (cks)
    cv = MatMul (encoder_hidden_states, wv) cvs = Reshape (cv, split)
    present_value_cross_0 = Transpose <perm = [0, 2, 1, 3]> (cvs)
    x = Gather (table, decoder_input_ids) q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)
    y, present_key_self_0, present_value_self_0 = com.microsoft.MultiHeadAttention
        <num_heads = {heads}, unidirectional = 1> (q, k, v)
    c = com.microsoft.MultiHeadAttention <num_heads = {heads}>
        (y, present_key_cross_0, present_value_cross_0)
    logits = MatMul (c, out) }}""",
    "decoder": """decoder (int32[b, 1] input_ids, float[b, {heads}, p, {size}] past_key_self_0,
        float[b, {heads}, p, {size}] past_value_self_0,
        float[b, {heads}, e, {size}] past_key_cross_0,
        float[b, {heads}, e, {size}] past_value_cross_0)
    => (float[b, 1, {words}] logits, float[b, {heads}, t, {size}] present_key_self_0,
        float[b, {heads}, t, {size}] present_value_self_0) {{
    x = Gather (table, input_ids) q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)
    y, present_key_self_0, present_value_self_0 = com.microsoft.MultiHeadAttention
        <num_heads = {heads}, unidirectional = 1>
        (q, k, v, , , , past_key_self_0, past_value_self_0)
    c = com.microsoft.MultiHeadAttention <num_heads = {heads}>
        (y, past_key_cross_0, past_value_cross_0)
    logits = MatMul (c, out) }}""",
}


def _graph(text: str, arrays: Mapping[str, np.ndarray], **sizes: int) -> onnx.GraphProto:
    graph = onnx.parser.parse_graph(text.format(**sizes))
    graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items())
    return graph


def _search(ids: np.ndarray, steps: int, prompt: int, beams: Sequence[Held | None]) -> list[Any]:
    """Inputs up to those of beams. No token ends a sequence before its last step."""
    end = Held(int32(prompt + steps))
    return [ids, end, end, *beams]


def _gpt(draw: Draw, words: int, heads: int, size: int) -> dict[str, Any]:
    width = heads * size
    shapes: dict[str, Dims] = {
        "table": (words, width),
        "places": (64, width),
        "weights": (width, 3 * width),
    }
    shapes |= {"bias": (3 * width,), "out": (width, words)}
    arrays = {name: draw.real(*shape) for name, shape in shapes.items()}
    graph = _graph(_GPT, arrays, words=words, heads=heads, size=size)
    return {"decoder": graph, "eos_token_id": 1, "pad_token_id": 0}


@operator_case("GreedySearch", *SEARCHES)
def greedy_search(draw: Draw, words: int, heads: int, size: int, steps: int) -> Node:
    ids = 2 + draw.whole(words - 2, 1, 4, dtype=np.int32)
    return Node(_search(ids, steps, 4, []), _gpt(draw, words, heads, size))


@operator_case("Sampling", *SEARCHES)
def sampling(draw: Draw, words: int, heads: int, size: int, steps: int) -> Node:
    ids = 2 + draw.whole(words - 2, 1, 4, dtype=np.int32)
    attrs = {**_gpt(draw, words, heads, size), "top_p": 0.9, "temperature": 1.0}
    return Node([*_search(ids, steps, 4, []), *[None] * 5, Held(int32(7))], attrs)


BEAMS = [Held(int32(4)), Held(int32(1)), Held(np.array([1], np.float32))]


@operator_case("BeamSearch", *SEARCHES)
def beam_search(draw: Draw, words: int, heads: int, size: int, steps: int) -> Node:
    ids = 2 + draw.whole(words - 2, 1, 4, dtype=np.int32)
    return Node(_search(ids, steps, 4, BEAMS), _gpt(draw, words, heads, size))


@operator_case("WhisperBeamSearch", *SEARCHES)
def whisper_beam_search(draw: Draw, words: int, heads: int, size: int, steps: int) -> Node:
    width = heads * size
    arrays = {f"w{name}": draw.real(width, width) for name in "qkv"}
    arrays |= {"features": draw.real(6, width), "table": draw.real(words, width)}
    arrays |= {"out": draw.real(width, words), "split": np.array([0, 0, heads, size])}
    sizes = {"words": words, "heads": heads, "size": size, "width": width}
    graphs = {name: _graph(text, arrays, **sizes) for name, text in _WHISPER.items()}
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 2}
    inputs = _search(draw.real(1, 6, 8 * steps), steps, 1, BEAMS)
    return Node(inputs, {**graphs, **tokens, "model_type": 2, "early_stopping": 1})
