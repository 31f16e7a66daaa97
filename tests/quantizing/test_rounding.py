"""Codes that are learned: no worse than the nearest ones, and of the inputs that layers really have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.core.records import replace
from penstock.frontends.onnx.writer import onnx_bytes
from penstock.quantizing import rounding
from penstock.quantizing.layers import layers_of
from penstock.quantizing.rewriting import GraphRewriter
from penstock.quantizing.rounding import gram_matrices, input_rows, learned_codes
from penstock.quantizing.samples import samples_of
from penstock.quantizing.source import float_model
from penstock.quantizing.weights import learned
from tests.support.exact_runtime import exact_session
from tests.support.quantizable import convolutional, feed_forward, images, rows, with_weights

ENDS = np.array(-7), np.array(7)


def errors(weights, real, x):
    """The squared errors of results, for each row of weights."""
    return np.square((weights - real) @ x.transpose(0, 2, 1)).sum(axis=-1)


def problem(seed, groups, count, inner, samples, rank):
    """Weights, scales of 4 bits, and inputs that lie near a space of ``rank`` dims."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((groups, count, inner)).astype(np.float32)
    scales = np.broadcast_to(np.abs(weights).max(axis=2, keepdims=True) / 7, weights.shape)
    base = rng.standard_normal((groups, samples, rank)) @ rng.standard_normal((groups, rank, inner))
    x = base + 0.1 * rng.standard_normal((groups, samples, inner))
    return weights, scales, x.astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(
    *(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 5), st.integers(1, 150)),
    *(st.integers(1, 60), st.integers(1, 8)),
)
def test_no_row_is_worse_than_with_the_nearest_codes(seed, groups, count, inner, samples, rank):
    weights, scales, x = problem(seed, groups, count, inner, samples, rank)
    codes = learned_codes(weights, scales, x.transpose(0, 2, 1) @ x, ENDS)
    nearest = np.rint(weights / scales).clip(-7, 7)
    assert (codes == np.rint(codes)).all() and np.abs(codes).max() <= 7
    ours, plain = (errors(weights, own * scales, x) for own in (codes, nearest))
    assert (
        ours <= plain * (1 + 1e-3) + 1e-5 * np.square(weights @ x.transpose(0, 2, 1)).sum()
    ).all()


def test_correlated_inputs_have_half_of_the_error():
    weights, scales, x = problem(0, 2, 16, 128, 400, 12)
    codes = learned_codes(weights, scales, x.transpose(0, 2, 1) @ x, ENDS)
    nearest = np.rint(weights / scales).clip(-7, 7)
    assert (
        errors(weights, codes * scales, x).sum() < 0.25 * errors(weights, nearest * scales, x).sum()
    )


def test_rows_of_one_sign_keep_it():
    weights, scales, x = problem(0, 1, 16, 64, 300, 8)
    weights[0, :5] = np.abs(weights[0, :5])
    weights[0, 5:10] = -np.abs(weights[0, 5:10])
    codes = learned_codes(weights, scales, x.transpose(0, 2, 1) @ x, ENDS)[0]
    assert codes[:5].min() == 0 == codes[5:10].max()
    assert codes[10:].min() < 0 < codes[10:].max()


def test_codes_are_near_the_best_ones():
    weights, scales, x = problem(3, 1, 8, 5, 60, 2)
    codes = learned_codes(weights, scales, x.transpose(0, 2, 1) @ x, ENDS)
    steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 5), axis=-1).reshape(-1, 5)
    near = (np.rint(weights / scales)[0][:, None] + steps).clip(-7, 7)  # all codes nearby
    every = errors(weights[0][:, None], near * scales[0][:, None], x)
    best = every.min(axis=1).sum()
    nearest = errors(weights, np.rint(weights / scales).clip(-7, 7) * scales, x).sum()
    assert best <= errors(weights, codes * scales, x).sum() <= best + (nearest - best) / 3


@given(st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_codes_are_the_nearest_where_inputs_do_not_depend_on_one_another(seed):
    weights, scales, x = problem(seed, 2, 3, 20, 10, 3)
    gram = np.einsum("gsi,ij->gij", x**2, np.eye(20, dtype=np.float32))
    codes = learned_codes(weights, scales, gram, ENDS)
    np.testing.assert_array_equal(codes, np.rint(weights / scales).clip(-7, 7))


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_codes_are_the_nearest_where_inputs_say_nothing(value):
    weights, scales, _ = problem(0, 1, 3, 8, 5, 2)
    codes = learned_codes(weights, scales, np.full((1, 8, 8), value, np.float32), ENDS)
    np.testing.assert_array_equal(codes, np.rint(weights / scales).clip(-7, 7))


CONVOLUTIONS = {
    "plain": ("", (6, 4, 3, 3)),
    "uneven": ("<strides=[2,1], pads=[0,1,2,3], dilations=[1,2]>", (6, 4, 3, 2)),
    "same": ('<auto_pad="SAME_UPPER", strides=[2,2]>', (6, 4, 3, 3)),
    "groups": ("<group=2, pads=[1,1,1,1]>", (6, 2, 3, 3)),
    "depthwise": ("<group=4>", (16, 1, 2, 2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_rows_of_a_convolution_give_its_results(name):
    attrs, shape = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    proto = with_weights(
        f"g (float[2,4,9,8] x, float[{','.join(map(str, shape))}] w) => (float[2,{shape[0]},H,W] y)"
        f"{{ y = Conv{attrs}(x, w) }}",
        w=w,
    )
    x = rng.standard_normal((2, 4, 9, 8)).astype(np.float32)
    session = exact_session(proto.SerializeToString())
    (wanted,) = session.run(None, {"x": x})
    (layer,) = layers_of(float_model(ps.load(proto)).graph)
    by_group = input_rows(layer, x, 10**6)
    results = by_group @ w.reshape(len(by_group), -1, by_group.shape[2]).transpose(0, 2, 1)
    results = np.moveaxis(results, 1, 2).reshape(shape[0], -1)
    np.testing.assert_allclose(results, np.moveaxis(wanted, 1, 0).reshape(shape[0], -1), atol=1e-4)
    # As of images with channels last.
    last = input_rows(layer._replace(channels=-1), np.moveaxis(x, 1, -1), 10**6)
    np.testing.assert_array_equal(last, by_group)
    some = input_rows(layer, x, 7)
    assert some.shape == (len(by_group), 7, by_group.shape[2])
    every = {row.tobytes() for row in by_group[0]}
    assert all(row.tobytes() in every for row in some[0])


@pytest.mark.parametrize("most", [2**28, 50_000])
def test_gram_matrices_are_those_of_all_samples(monkeypatch, most):
    monkeypatch.setattr(rounding, "_MOST_BYTES", most)
    model = float_model(ps.load(feed_forward()))
    session = ps.compile(model)
    layers = [layer for layer in layers_of(model.graph) if layer.learns]
    data = rows()
    samples = samples_of(data, ["x"])
    grams = {layer.name: gram for layer, gram in gram_matrices(session, layers, samples)}
    names = {layer.name: layer.x.name for layer in layers}
    # A matrix of 128 inputs has 65 kB.
    assert grams.keys() == {n for n in names if most > 65_536 or n == "up"}
    for name, gram in grams.items():
        values = [session.run({"x": x}, fetches=[names[name]])[names[name]] for x in data]
        flat = np.concatenate([v.reshape(-1, v.shape[-1]) for v in values])
        np.testing.assert_allclose(gram[0], flat.T @ flat, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "data", "type_", "most"),
    [
        (convolutional, images, "weights8", 0.2),  # smooth images
        (feed_forward, rows, "weights8", 0.95),  # rows of which no element tells of another
        (feed_forward, rows, "blocks4", 0.99),
    ],
)
def test_models_of_learned_codes_have_less_error_in_onnxruntime(make, data, type_, most):
    model = float_model(ps.load(make()))
    rewriter, session = GraphRewriter(model.graph), ps.compile(model)
    layers = [layer for layer in rewriter.layers if type_ in layer.types]
    choice = {layer.name: type_ for layer in layers}

    def written():
        form = rewriter.rewritten(choice, {}, {})
        return onnx_bytes(replace(model, graphs={model.entry: form.graph}))

    files = [written()]
    for layer, gram in gram_matrices(session, layers, samples_of(data(24), ["x"])):
        rewriter.learn(layer, type_, learned(layer, type_, gram, rewriter.shifts))
    files.append(written())
    assert len(files[0]) == pytest.approx(len(files[1]), abs=200)
    unseen, errors = data(32)[24:], []
    wanted = np.stack([session(x) for x in unseen])
    for file in files:
        theirs = exact_session(file)
        outputs = np.stack([theirs.run(None, {"x": x})[0] for x in unseen])
        errors.append(np.sqrt(np.square(outputs - wanted).mean()))
        ours = ps.compile(file)(unseen[0])
        np.testing.assert_allclose(ours, outputs[0], atol=0.01 * np.ptp(wanted))
    assert errors[1] < most * errors[0]
