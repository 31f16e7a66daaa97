"""Searches, which become a Loop around their decoder, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from tests.support.sweeps import sweep

HEADS, SIZE = 2, 4
WIDTH = HEADS * SIZE
PAD, EOS = 0, 1
INPUTS = {
    "GreedySearch": [
        *("input_ids", "max_length", "min_length", "repetition_penalty", "vocab_mask"),
        *("prefix_vocab_mask", "attention_mask"),
    ],
    "BeamSearch": [
        *("input_ids", "max_length", "min_length", "num_beams", "num_return_sequences"),
        *("length_penalty", "repetition_penalty", "vocab_mask", "prefix_vocab_mask"),
        *("attention_mask", "decoder_input_ids", "logits_processor"),
    ],
}
INPUTS["WhisperBeamSearch"] = [
    *INPUTS["BeamSearch"],
    *("cross_qk_layer_head", "extra_decoding_ids", "temperature"),
]
INPUTS["Sampling"] = [*INPUTS["GreedySearch"], "presence_mask", "seed"]
RESULTS = ["sequences", "sequences_scores", "scores"]


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def float32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def decoder(seed: int = 0, words: int = 20, layers: int = 1) -> onnx.GraphProto:
    """A small GPT-2: embeddings of words and positions, layers of attention, logits."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    arrays = {"words": weights(words, WIDTH), "places": weights(64, WIDTH) / 2}
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Gather", ["places", "position_ids"], ["place"]),
        helper.make_node("Add", ["word", "place"], ["x0"]),
    ]
    for i in range(layers):
        arrays |= {f"w{i}": weights(WIDTH, 3 * WIDTH), f"b{i}": weights(3 * WIDTH)}
        names = [f"x{i}", f"w{i}", f"b{i}", "attention_mask", f"past_{i}"]
        attention = helper.make_node(
            "Attention",
            names,
            [f"y{i}", f"present_{i}"],
            domain="com.microsoft",
            num_heads=HEADS,
            unidirectional=1,
        )
        nodes += [attention, helper.make_node("Add", [f"x{i}", f"y{i}"], [f"x{i + 1}"])]
    arrays["out"] = weights(WIDTH, words)
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "out"], ["logits"]))
    info = helper.make_tensor_value_info
    dims = [("input_ids", "s"), ("position_ids", "s"), ("attention_mask", "t")]
    pasts = [
        info(f"past_{i}", TensorProto.FLOAT, [2, "b", HEADS, "p", SIZE]) for i in range(layers)
    ]
    presents = [
        info(f"present_{i}", TensorProto.FLOAT, [2, "b", HEADS, "t", SIZE]) for i in range(layers)
    ]
    return helper.make_graph(
        nodes,
        "decoder",
        [*(info(name, TensorProto.INT32, ["b", dim]) for name, dim in dims), *pasts],
        [info("logits", TensorProto.FLOAT, ["b", "s", words]), *presents],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )


def encoder_and_decoder(
    seed: int, layers: int, *, both: bool, hidden: bool, whole: bool = False, words: int = 20
) -> dict[str, onnx.GraphProto]:
    """A small T5. ``both``: the encoder also runs the decoder on the start token; ``hidden``: the
    decoder is given the hidden states; ``whole``: and all tokens so far."""
    rng = np.random.default_rng(seed)
    info, node = helper.make_tensor_value_info, helper.make_node
    arrays = {"words": rng.normal(size=(words, WIDTH)), "out": rng.normal(size=(WIDTH, words)) / 4}
    for i in range(layers):
        arrays |= {f"{n}{i}": rng.normal(size=(WIDTH, WIDTH)) / 2 for n in ("q", "k", "v")}
        arrays |= {f"c{n}{i}": rng.normal(size=(WIDTH, WIDTH)) / 2 for n in ("q", "k", "v")}
    constants = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    constants.append(numpy_helper.from_array(np.array([0, 0, HEADS, SIZE]), "split"))

    def names(form: str) -> list[str]:
        return [form.format(kind, i) for i in range(layers) for kind in ("key", "value")]

    own, crossed = names("present_{}_self_{}"), names("present_{}_cross_{}")
    past, fixed = names("past_{}_self_{}"), names("past_{}_cross_{}")

    def attention(inputs: list[str], outputs: list[str], causal: int) -> onnx.NodeProto:
        options = {"num_heads": HEADS, "unidirectional": causal}
        return node("MultiHeadAttention", inputs, outputs, domain="com.microsoft", **options)

    def decode(ids: str, before: list[str], cross: list[str]) -> list[onnx.NodeProto]:
        nodes = [node("Gather", ["words", ids], ["x0"])]
        for i in range(layers):
            pair = slice(2 * i, 2 * i + 2)
            parts = [f"{n}{i}x" for n in "qkv"]
            nodes += [node("MatMul", [f"x{i}", f"{n}{i}"], [f"{n}{i}x"]) for n in "qkv"]
            inputs = [*parts, "", "", "", *before[pair]] if before else parts
            nodes.append(attention(inputs, [f"s{i}", *own[pair]], 1))
            nodes.append(node("Add", [f"x{i}", f"s{i}"], [f"y{i}"]))
            nodes.append(node("MatMul", [f"y{i}", f"cq{i}"], [f"cq{i}x"]))
            inputs = [f"cq{i}x", *cross[pair], "", "encoder_attention_mask"]
            nodes.append(attention(inputs, [f"c{i}"], 0))
            nodes.append(node("Add", [f"y{i}", f"c{i}"], [f"x{i + 1}"]))
        return [*nodes, node("MatMul", [f"x{layers}", "out"], ["logits"])]

    def floats(names: list[str], length: Any) -> list[onnx.ValueInfoProto]:
        return [info(name, TensorProto.FLOAT, ["b", HEADS, length, SIZE]) for name in names]

    nodes = [node("Gather", ["words", "encoder_input_ids"], ["e"])]
    projections = [f"c{n}{i}" for i in range(layers) for n in "kv"]
    for name, weights in zip(crossed, projections, strict=True):
        nodes.append(node("MatMul", ["e", weights], [f"{name}x"]))
        nodes.append(node("Reshape", [f"{name}x", "split"], [f"{name}y"]))
        nodes.append(node("Transpose", [f"{name}y"], [name], perm=[0, 2, 1, 3]))
    mask = info("encoder_attention_mask", TensorProto.INT32, ["b", "e"])
    encoder_inputs = [info("encoder_input_ids", TensorProto.INT32, ["b", "e"]), mask]
    encoder_outputs = floats(crossed, "e")
    if both:
        encoder_inputs.append(info("decoder_input_ids", TensorProto.INT32, ["b", 1]))
        nodes += decode("decoder_input_ids", [], crossed)
        nodes.append(node("Identity", ["e"], ["encoder_hidden_states"]))
        encoder_outputs = [
            info("logits", TensorProto.FLOAT, ["b", 1, words]),
            info("encoder_hidden_states", TensorProto.FLOAT, ["b", "e", WIDTH]),
            *floats(own, 1),
            *encoder_outputs,
        ]
    length = "s" if whole else 1
    states = [info("encoder_hidden_states", TensorProto.FLOAT, ["b", "e", WIDTH])]
    decoder_inputs = [info("input_ids", TensorProto.INT32, ["b", length]), mask]
    decoder_inputs += [*(states if hidden else ()), *floats(past, "p"), *floats(fixed, "e")]
    logits = info("logits", TensorProto.FLOAT, ["b", length, words])
    encoder = helper.make_graph(nodes, "encoder", encoder_inputs, encoder_outputs, constants)
    nodes = decode("input_ids", past, fixed)
    outputs = [logits, *floats(own, "t")]
    return {
        "encoder": encoder,
        "decoder": helper.make_graph(nodes, "decoder", decoder_inputs, outputs, constants),
    }


def search_model(
    op: str, feeds: Mapping[str, np.ndarray], outputs: int = 1, **attrs: Any
) -> onnx.ModelProto:
    names = [name if name in feeds else "" for name in INPUTS[op]]
    while not names[-1]:
        names.pop()
    attrs = {"decoder": decoder(), "eos_token_id": EOS, "pad_token_id": PAD, **attrs}
    node = helper.make_node(op, names, RESULTS[:outputs], "search", domain="com.microsoft", **attrs)

    def info(name: str, dtype: Any, shape: Any) -> onnx.ValueInfoProto:
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, code, shape)

    inputs = [info(name, feeds[name].dtype, feeds[name].shape) for name in names if name]
    dtypes = [np.int32, np.float32, np.float32]
    results = [
        info(name, dtype, None) for name, dtype in zip(RESULTS[:outputs], dtypes, strict=False)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", inputs, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run_ort(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, dict(feeds)))


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], **options: Any) -> list[Any]:
    return list(ps.compile(model, **options).run(dict(feeds)).values())


def options_of(rng: np.random.Generator, words: int, batch: int, length: int) -> dict[str, Any]:
    """Some of the optional inputs that both searches have."""
    feeds: dict[str, Any] = {}
    if rng.random() < 0.4:
        feeds["repetition_penalty"] = float32(rng.choice([0.7, 1.3]))
    if rng.random() < 0.3:
        feeds["min_length"] = int32(length + 3)
    for name, shape in (("vocab_mask", (words,)), ("prefix_vocab_mask", (batch, words))):
        if rng.random() < 0.3:
            feeds[name] = (rng.random(shape) < 0.6).astype(np.int32)
            feeds[name][..., :4] = 1  # there is a choice left
    return feeds


def case(rng: np.random.Generator, op: str, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Feeds and attributes of a search of any form."""
    words, length = int(rng.choice([8, 20])), int(rng.integers(1, 5))
    ids = rng.integers(2, words, (batch, length)).astype(np.int32)
    if rng.random() < 0.3:
        ids[0, : length // 2] = PAD
    feeds = {"input_ids": ids, "max_length": int32(length + int(rng.integers(1, 9)))}
    feeds |= {"min_length": int32(1)} | options_of(rng, words, batch, length)
    if rng.random() < 0.3:
        feeds["attention_mask"] = (ids != PAD).astype(np.int32)
    attrs: dict[str, Any] = {"no_repeat_ngram_size": int(rng.integers(0, 4))}
    attrs["decoder"] = decoder(int(rng.integers(100)), words, int(rng.integers(1, 3)))
    if op == "BeamSearch":
        beams = int(rng.integers(1, 4))
        feeds |= {
            "num_beams": int32(beams),
            "num_return_sequences": int32(int(rng.integers(1, beams + 1))),
            "length_penalty": float32(rng.choice([0, 1, 2, -1])),
        }
        # Of several samples, ONNX Runtime takes the best score of another one to decide whether it
        # is worth going on.
        attrs["early_stopping"] = int(batch > 1 or rng.random() < 0.5)
    return feeds, attrs


def check_tokens(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    (want,), (got,) = run_ort(model, feeds), run(model, feeds)
    # Behind the longest sequence ONNX Runtime leaves what was in memory.
    prompt = feeds["input_ids"].shape[1]
    last = prompt + np.flatnonzero((got[:, prompt:] != PAD).any(axis=0)).max(initial=-1)
    np.testing.assert_array_equal(got[:, : last + 1], want[:, : last + 1])
    assert got.shape == want.shape
    assert (got[:, last + 1 :] == PAD).all()


@pytest.mark.parametrize("seed", sweep(range(120), 30))
def test_greedy_search_matches_onnx_runtime(seed: int) -> None:
    feeds, attrs = case(np.random.default_rng(seed), "GreedySearch", 1 + seed % 3)
    check_tokens(search_model("GreedySearch", feeds, **attrs), feeds)


@pytest.mark.parametrize("seed", sweep(range(120), 30))
def test_sampling_draws_the_tokens_of_onnx_runtime(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feeds, attrs = case(rng, "Sampling", 1 + seed % 3)
    feeds["seed"] = int32(seed)
    attrs |= {
        "top_p": float(rng.choice([0.2, 0.5, 0.9, 1.0])),
        "temperature": float(rng.choice([0.5, 1.0, 2.0])),
        "custom": int(rng.integers(0, 2)),
        "min_tokens_to_keep": int(rng.integers(0, 4)),
        "filter_value": float(rng.choice([-1e20, -5.0])),
    }
    check_tokens(search_model("Sampling", feeds, **attrs), feeds)


@pytest.mark.parametrize("seed", sweep(range(120), 30))
def test_beam_search_matches_onnx_runtime(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feeds, attrs = case(rng, "BeamSearch", 1 + seed % 3)
    model = search_model("BeamSearch", feeds, 3, **attrs)
    wanted, results = run_ort(model, feeds), run(model, feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-4, atol=1e-4)
    assert results[2].shape == wanted[2].shape
    np.testing.assert_allclose(results[2][0], wanted[2][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["GreedySearch", "BeamSearch"])
@pytest.mark.parametrize("steps", [1, 6])
def test_search_with_an_initial_decoder_matches_onnx_runtime(op: str, steps: int) -> None:
    feeds = {"input_ids": np.array([[2, 3, 4], [5, 6, 7]], np.int32)}
    feeds |= {"max_length": int32(3 + steps), "min_length": int32(1)}
    if op == "BeamSearch":
        feeds |= {"num_beams": int32(3), "num_return_sequences": int32(2)}
        feeds["length_penalty"] = float32(1)
    model = search_model(op, feeds, decoder=decoder(3), init_decoder=decoder(5))
    np.testing.assert_array_equal(run(model, feeds)[0], run_ort(model, feeds)[0])


@pytest.mark.parametrize("seed", sweep(range(80), 20))
def test_beam_search_with_an_encoder_matches_onnx_runtime(seed: int) -> None:
    rng = np.random.default_rng(seed)
    both, batch, length = seed % 3 > 0, 1 + seed % 2, int(rng.integers(1, 5))
    ids = rng.integers(2, 20, (batch, length)).astype(np.int32)
    if rng.random() < 0.5:
        ids[0, [0, -1]] = PAD
    beams = int(rng.integers(1, 4))
    feeds = {
        "input_ids": ids,
        "max_length": int32(int(rng.integers(3, 10))),
        "min_length": int32(1),
        "num_beams": int32(beams),
        "num_return_sequences": int32(int(rng.integers(1, beams + 1))),
        "length_penalty": float32(rng.choice([0, 1, 2])),
    }
    if rng.random() < 0.3:
        feeds["attention_mask"] = (rng.random((batch, length)) < 0.7).astype(np.int32)
    graphs = encoder_and_decoder(
        seed, 1 + seed % 2, both=both, hidden=both and seed % 3 > 1, whole=rng.random() < 0.3
    )
    attrs = {"model_type": 1, "decoder_start_token_id": 2, "early_stopping": 1}
    model = search_model("BeamSearch", feeds, 2, **graphs, **attrs)
    wanted, results = run_ort(model, feeds), run(model, feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-3, atol=1e-4)


def whisper(seed: int, layers: int, hidden: bool, words: int = 20) -> dict[str, onnx.GraphProto]:
    """A small Whisper: its encoder reads 6 features, and there are no masks."""
    graphs = encoder_and_decoder(seed, layers, both=True, hidden=hidden, words=words)
    for graph in graphs.values():
        for node in graph.node:
            if "encoder_attention_mask" in node.input:
                del node.input[3:]
        inputs = [info for info in graph.input if info.name != "encoder_attention_mask"]
        del graph.input[:]
        graph.input.extend(inputs)
    encoder = graphs["encoder"]
    encoder.node[0].CopyFrom(helper.make_node("MatMul", ["encoder_input_ids", "features"], ["e"]))
    features = np.random.default_rng(seed).normal(size=(6, WIDTH)).astype(np.float32)
    encoder.initializer.append(numpy_helper.from_array(features, "features"))
    encoder.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    encoder.input[0].type.tensor_type.shape.dim.add().dim_value = 6
    for info in (encoder.input[1], encoder.output[0]):
        info.type.tensor_type.shape.dim[1].dim_param = "s"
    for info in encoder.output[2 : 2 + 2 * layers]:
        info.type.tensor_type.shape.dim[2].dim_param = "s"
    return graphs


@pytest.mark.parametrize("op", ["BeamSearch", "WhisperBeamSearch"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("prompt", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_beam_search_of_whisper_matches_onnx_runtime(
    op: str, hidden: bool, prompt: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    feeds = BEAMS | {"input_ids": rng.normal(size=(2, 5, 6)).astype(np.float32)}
    if prompt:
        feeds["decoder_input_ids"] = rng.integers(2, 20, (2, prompt)).astype(np.int32)
    if op == "WhisperBeamSearch":
        feeds["temperature"] = float32(1 + seed)
    attrs = {"model_type": 2, "decoder_start_token_id": 2, "early_stopping": 1}
    model = search_model(op, feeds, 2, **whisper(seed, 1 + seed, hidden), **attrs)
    wanted, results = run_ort(model, feeds), run(model, feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-4, atol=1e-5)


def test_beam_search_with_weights_that_its_graphs_share_gives_the_same() -> None:
    feeds = BEAMS | {"input_ids": np.ones((2, 5, 6), np.float32)}
    model = search_model(
        "WhisperBeamSearch", feeds, decoder_start_token_id=2, **whisper(3, 1, True)
    )
    want = run_ort(model, feeds)
    (node,) = model.graph.node
    encoder, decoder = (a.g for a in node.attribute if a.name in ("encoder", "decoder"))
    shared = [tensor for tensor in encoder.initializer if tensor in decoder.initializer]
    model.graph.initializer.extend(shared)
    for graph in (encoder, decoder):
        own = [tensor for tensor in graph.initializer if tensor not in shared]
        del graph.initializer[:]
        graph.initializer.extend(own)
    assert len(shared) > 5
    np.testing.assert_array_equal(run(model, feeds)[0], want[0])


@pytest.mark.parametrize("seed", sweep(range(60), 20))
def test_beam_search_of_whisper_keeps_timestamps_as_onnx_runtime(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = (30, 120)[seed % 2]
    # Text up to 9, the end at 10, other signs up to 16, and times.
    names = ["eos", "decoder_start", "translate", "transcribe", "start_of_lm"]
    tokens = {f"{name}_token_id": 10 + i for i, name in enumerate(names)}
    tokens |= {"no_timestamps_token_id": 16, "beginning_timestamp_token_id": 17}
    prompt = np.full((2, int(rng.integers(1, 4))), 11, np.int32)
    if rng.random() < 0.3:
        prompt[:, -1] = 17
    feeds = BEAMS | {
        "input_ids": rng.normal(size=(2, 5, 6)).astype(np.float32),
        "max_length": int32(14),
        "decoder_input_ids": prompt,
        "logits_processor": int32(1),
    }
    attrs = {"pad_token_id": 10, "early_stopping": 1} | tokens
    model = search_model(
        "WhisperBeamSearch", feeds, 2, **whisper(seed, 1, seed % 3 > 0, words), **attrs
    )
    wanted, results = run_ort(model, feeds), run(model, feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-4, atol=1e-5)


BEAMS: dict[str, np.ndarray] = {
    "input_ids": np.array([[2, 3, 4], [5, 6, 7]], np.int32),
    "max_length": int32(9),
    "min_length": int32(1),
    "num_beams": int32(3),
    "num_return_sequences": int32(2),
    "length_penalty": float32(1),
}


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "frames", "interpret"])
def test_beam_search_runs_on_every_executor(executor: str) -> None:
    model = search_model("BeamSearch", BEAMS, 2)
    for got, want in zip(run(model, BEAMS, executor=executor), run_ort(model, BEAMS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_beam_search_becomes_a_loop_in_the_program() -> None:
    session = ps.compile(search_model("BeamSearch", BEAMS, 2))
    session.run(BEAMS)
    assert session.source.count("    for ") == 1
    assert "searchstep" in session.source


@pytest.mark.parametrize(
    "change",
    [
        {"num_beams": int32(0)},
        {"num_beams": int32(2, 2)},
        {"num_return_sequences": int32(4)},
        {"max_length": int32(2)},
        *({name: float32(np.nan)} for name in ("max_length", "num_beams", "num_return_sequences")),
        {"attention_mask": np.ones((2, 4), np.int32)},
    ],
)
def test_beam_search_of_misfit_inputs_is_an_error_of_the_run(change: dict[str, Any]) -> None:
    feeds = BEAMS | change
    with pytest.raises(ps.RunError, match="search"):
        run(search_model("BeamSearch", feeds), feeds)


ENCODER = encoder_and_decoder(0, 1, both=False, hidden=False)["encoder"]


def without_pasts() -> onnx.GraphProto:
    graph = decoder()
    del graph.input[3:]
    return graph


def of_unknown_heads() -> onnx.GraphProto:
    graph = decoder()
    graph.input[3].type.tensor_type.shape.dim[2].dim_param = "h"
    return graph


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"decoder": without_pasts()}, "past states"),
        ({"decoder": of_unknown_heads()}, "heads of known size"),
        ({"init_decoder": decoder(layers=2)}, "different inputs"),
        ({"model_type": 3}, "type 3"),
        ({"model_type": 1, "encoder": ENCODER}, "encoder_attention_mask"),
    ],
)
def test_search_of_other_forms_is_unsupported(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.Unsupported, match=message):
        ps.compile(search_model("BeamSearch", BEAMS, **attrs))


@pytest.mark.parametrize(
    "attrs",
    [
        {"decoder": 3},
        {"eos_token_id": "a"},
        {"pad_token_id": 2**31},
        {"early_stopping": 0.5},
        {"model_type": 1},
    ],
)
def test_search_with_attributes_of_wrong_types_is_invalid(attrs: dict[str, Any]) -> None:
    with pytest.raises(ps.InvalidModel, match="search"):
        ps.compile(search_model("BeamSearch", BEAMS, **attrs))


def test_search_without_required_inputs_is_invalid() -> None:
    feeds = {key: value for key, value in BEAMS.items() if key != "max_length"}
    with pytest.raises(ps.InvalidModel, match="max_length"):
        ps.compile(search_model("BeamSearch", feeds))


@pytest.mark.parametrize("name", ["decoder_input_ids", "logits_processor"])
def test_search_with_other_inputs_is_unsupported(name: str) -> None:
    feeds = BEAMS | {name: np.ones((2, 1), np.int32)}
    with pytest.raises(ps.Unsupported, match="not supported"):
        ps.compile(search_model("BeamSearch", feeds))


def test_sampling_penalizes_present_tokens_of_each_sample() -> None:
    # ONNX Runtime takes the penalties of all tokens off the first one.
    present = np.ones((2, 20), np.int32)
    present[0, [3, 4]] = present[1, [5, 6]] = 0
    feeds = {"input_ids": BEAMS["input_ids"], "max_length": int32(20), "presence_mask": present}
    model = search_model("Sampling", feeds, top_p=1.0, presence_penalty=100.0)
    first, second = run(model, feeds)[0][:, 3:]
    assert set(first) == {3, 4}
    assert set(second) == {5, 6}


def test_sampling_of_other_forms_is_refused() -> None:
    feeds = {"input_ids": BEAMS["input_ids"], "max_length": int32(9), "seed": int32(-1)}
    with pytest.raises(ps.RunError, match="seed"):
        run(search_model("Sampling", feeds), feeds)
    with pytest.raises(ps.InvalidModel, match="top_p"):
        ps.compile(search_model("Sampling", feeds, top_p=1))
    with pytest.raises(ps.Unsupported, match="other than sequences"):
        ps.compile(search_model("Sampling", feeds, 2))
