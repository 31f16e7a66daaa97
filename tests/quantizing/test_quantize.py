"""``penstock.quantize``."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.host.native import library
from penstock.quantizing import quantize as quantizing
from penstock.quantizing.search import Search
from tests.support.exact_runtime import exact_session
from tests.support.onnx_text import model_from_text
from tests.support.quantizable import convolutional, feed_forward, images, rows


def test_written_model_keeps_the_error_on_samples_held_out(tmp_path):
    data = images(12)
    quantized = ps.quantize(convolutional(), [*data], max_error=0.02, threads=1)
    quantized.save(tmp_path / "q.onnx")
    session = exact_session(tmp_path / "q.onnx")
    original = ps.compile(convolutional())
    held = data[3::4]
    wanted = np.stack([original(x) for x in held])
    theirs = np.stack([session.run(None, {"x": x})[0] for x in held])
    ours = np.stack([ps.compile(tmp_path / "q.onnx")(x) for x in held])
    for outputs in (ours, theirs):
        rms = np.sqrt(np.square(outputs - wanted).mean(axis=(1, 2))).max() / np.ptp(wanted)
        assert rms <= 0.025
    report = quantized.report
    assert report["error"] <= 0.02
    assert report["samples"] == {"chosen_by": 9, "held_out": 3}
    json.dumps(report, allow_nan=False)
    assert {own["name"] for own in report["layers"]} >= {"first", "dense"}
    assert all(own["why"] for own in report["layers"])
    assert "<svg" in quantized.html and "error" in repr(quantized)


def test_weights_in_16_bits_are_in_the_report_and_the_file():
    quantized = ps.quantize(feed_forward(), [*rows()], size=0.6)
    layers = quantized.report["layers"]
    assert {own["type"] for own in layers} <= {"float32", "weights16", "weights8", "static"}
    halves = [own for own in layers if own["type"] == "weights16"]
    assert halves and all(own["bytes_after"] * 2 == own["bytes_before"] for own in halves)
    assert all(own["why"].startswith("smaller at the same speed") for own in halves)
    assert len(quantized.onnx) < 0.65 * len(feed_forward().SerializeToString())
    x = rows()[0]
    (theirs,) = exact_session(quantized.onnx).run(None, {"x": x})
    np.testing.assert_allclose(theirs, ps.compile(quantized.model)(x), atol=0.01)


def test_roundings_are_learned_where_a_size_is_wanted():
    report = ps.quantize(feed_forward(), [*rows()], size=0.2).report
    assert report["learned"]["layers"] > 0 and report["learned"]["seconds"] > 0


def test_any_batch_can_be_run(tmp_path):
    quantized = ps.quantize(feed_forward(), [*rows()], max_error=0.05)
    session = ps.compile(quantized.model)
    x = rows(1)[0]
    one, many = session(x[:1]), session(np.concatenate([x, x, x]))
    assert many.shape == (12, 64)
    np.testing.assert_allclose(one, ps.compile(feed_forward())(x[:1]), atol=0.2)


def test_saved_session(tmp_path):
    quantized = ps.quantize(feed_forward(), [*rows()], max_error=0.05)
    quantized.save(tmp_path / "q.penstock")
    x = rows()[0]
    np.testing.assert_allclose(
        ps.open(tmp_path / "q.penstock")(x), ps.compile(quantized.model)(x), atol=1e-5
    )


def test_report_of_infinite_errors_is_json():
    """Where elements are infinite depends on numbers that become codes."""
    text = """g (float[4, 64] x) => (float[4, 64] y) <float low = {-inf}, float z = {0}> {
        a = MatMul (x, w) above = Greater (a, z) y = Where (above, a, low) }"""
    model = model_from_text(text)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    quantized = ps.quantize(model, [*rows()], max_error=0.05)
    assert None in [point["error"] for point in quantized.report["points"]]
    json.dumps(quantized.report, allow_nan=False)
    assert "infinite" in quantized.html


def test_goal_that_cannot_be_met_says_what_is_possible():
    with pytest.raises(ps.PenstockError, match=r"possible are: error .* with time .* and size"):
        ps.quantize(feed_forward(), [*rows()], size=0.01)


@pytest.mark.parametrize("replacement", [lambda x: x * np.float32(np.nan), lambda x: x[:0]])
def test_samples_held_out_without_finite_outputs_are_refused(replacement):
    data = [*rows(7)]
    data[3] = replacement(data[3])
    with pytest.raises(ps.InvalidInput, match=r"held out, every fourth \(sample 3\)"):
        ps.quantize(feed_forward(), data, size=0.5, threads=1)


def test_metric_bounds_the_error():
    calls = []

    def metric(wanted, outputs):
        calls.append(len(wanted))
        return float(
            max(np.abs(a["y"] - b["y"]).max() for a, b in zip(wanted, outputs, strict=True))
        )

    quantized = ps.quantize(feed_forward(), [*rows()], max_error=0.3, metric=metric)
    assert calls and quantized.report["error"] <= 0.3


def untimed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a record without their times: the last measurement replaces that of a point
    which has become slower than the float model."""
    return [{**own, "time": 0} for own in record["points"]]


def test_search_that_was_stopped_is_resumed(tmp_path):
    path = tmp_path / "measured.json"
    ps.quantize(feed_forward(), [*rows()], max_error=0.05, resume=path)
    measured = json.loads(path.read_bytes())
    steps = []
    ps.quantize(
        feed_forward(),
        [*rows()],
        max_error=0.05,
        resume=path,
        progress=lambda step, done, total: steps.append(step),
    )
    again = json.loads(path.read_bytes())
    # What was learned of conversions may lead to more.
    before = untimed(measured)
    assert untimed(again)[: len(before)] == before
    assert again["seconds"] == measured["seconds"]
    assert "record ranges" not in steps
    with pytest.raises(ps.InvalidInput, match="another model"):
        ps.quantize(feed_forward(), [*rows(4)], max_error=0.05, resume=path)
    with pytest.raises(ps.InvalidInput, match="other samples"):
        ps.quantize(feed_forward(), [*rows()[:-1], rows()[0]], max_error=0.05, resume=path)
    with pytest.raises(ps.InvalidInput, match="other options"):
        metric = {"max_error": 0.05, "metric": lambda one, other: 0.0}
        ps.quantize(feed_forward(), [*rows()], resume=path, **metric)


def rounds_to_bfloat16():
    loaded = library()
    return loaded is not None and bool(loaded.multiplies_bfloat16)


def test_bfloat16_is_measured_where_the_processor_multiplies_it(tmp_path, monkeypatch):
    path, other = tmp_path / "measured.json", tmp_path / "other.json"
    ps.quantize(feed_forward(), [*rows()], max_error=0.05, resume=path)
    measured = json.loads(path.read_bytes())
    assert ("bfloat16" in measured["seconds"]) == rounds_to_bfloat16()
    monkeypatch.setattr(quantizing, "library", lambda: None)
    ps.quantize(feed_forward(), [*rows()], max_error=0.05, resume=other)
    assert "bfloat16" not in other.read_text()


def test_record_without_bfloat16_is_gone_on_from(tmp_path):
    path = tmp_path / "measured.json"
    ps.quantize(feed_forward(), [*rows()], max_error=0.05, resume=path)
    record = json.loads(path.read_bytes())
    record["seconds"].pop("bfloat16", None)
    record["points"] = [p for p in record["points"] if "bfloat16" not in p["choice"].values()]
    path.write_text(json.dumps(record))
    ps.quantize(feed_forward(), [*rows()], max_error=0.05, resume=path)
    again = json.loads(path.read_bytes())
    before = untimed(record)
    assert untimed(again)[: len(before)] == before
    assert ("bfloat16" in again["seconds"]) == rounds_to_bfloat16()


def test_deadline_and_cancel():
    with pytest.raises(ps.DeadlineExceeded):
        ps.quantize(convolutional(), [*images()], timeout=0)
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        ps.quantize(convolutional(), [*images()], cancel=token)


def test_progress_is_told():
    steps = []
    ps.quantize(feed_forward(), [*rows()], progress=lambda step, done, total: steps.append(step))
    assert {"record ranges", "choose ranges", "measure layers"} <= {*steps}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_error": 0}, ValueError, "above 0"),
        ({"time": "fast"}, TypeError, "time"),
        ({"metric": len}, ValueError, "max_error="),
        ({"metric": 3, "max_error": 1}, TypeError, "metric"),
        ({"threads": 0}, ValueError, "threads"),
        ({"maxerror": 1}, TypeError, "max_error"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        ps.quantize(feed_forward(), [*rows()], **options)


def test_operations_that_onnx_lacks_are_refused_before_anything_is_measured():
    from penstock.build import GraphBuilder

    b = GraphBuilder()
    x = b.input("x", np.float32, [4, 4])
    b.output("y", b.op("Cross", x[:, :3], x[:, 1:], domain="tensorflow"))
    with pytest.raises(ps.Unsupported, match=r"tensorflow.Cross.*cannot express"):
        ps.quantize(b.model(), [np.zeros((4, 4), np.float32)])


def test_model_without_layers_stays_as_it_is():
    quantized = ps.quantize(
        model_from_text("g (float[4] x) => (float[4] y) { y = Exp(x) }"), [np.ones(4, np.float32)]
    )
    assert quantized.report["layers"] == [] and quantized.report["size"] == 1.0


def with_weights(text, weights):
    model = model_from_text(text)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def matrix(seed, *shape):
    own = np.random.default_rng(seed).standard_normal(shape) / shape[0] ** 0.5
    return own.astype(np.float32)


def shared_by_heads():
    """Three outputs by one matrix, read as it is and transposed, and a copy of it."""
    text = """g (float[n,96] x) => (float[n,96] y, float[n,96] z, float[n,96] t) {
        y = MatMul(x, w) a = Relu(y) z = MatMul(a, w) b = Relu(z) s = Transpose(v) t = Gemm(b, s)
    }"""
    w = matrix(0, 96, 96)
    return with_weights(text, {"w": w, "v": np.ascontiguousarray(w.T)}), [
        matrix(i, 8, 96) for i in range(8)
    ]


def table_that_is_a_product_too():
    text = """g (int64[n] x) => (float[n,400] y) {
        e = Gather(w, x) h = Tanh(e) s = Transpose<perm=[1,0]>(w) y = MatMul(h, s)
    }"""
    rng = np.random.default_rng(0)
    return with_weights(text, {"w": 3 * matrix(1, 400, 96)}), [
        rng.integers(0, 400, 8) for _ in range(8)
    ]


@pytest.mark.parametrize("make", [shared_by_heads, table_that_is_a_product_too])
@pytest.mark.parametrize("goal", [{"size": 0.3}, {"max_error": 1e-9}, {"max_error": 0.02}])
def test_shared_weights_are_in_the_file_once(make, goal):
    model, data = make()
    quantized = ps.quantize(model, data, threads=1, **goal)
    share = len(quantized.onnx) / len(model.SerializeToString())
    # Names and shapes of nodes are no weights.
    assert abs(share - quantized.report["size"]) < 0.05
    assert quantized.report["size"] <= goal.get("size", 1.0)
    options = onnxruntime.SessionOptions()
    # Else it makes codes of the input of a product with stored weights, and does not load codes that
    # two products share.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = exact_session(quantized.onnx, options)
    theirs = session.run(None, {"x": data[0]})[0]
    np.testing.assert_allclose(
        theirs, ps.compile(quantized.model).run({"x": data[0]})["y"], atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_16_bits_have_layers(dtype):
    text = f"g ({dtype}[n,96] x) => ({dtype}[n,64] y) {{ h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }}"
    type_ = np.dtype(getattr(ml_dtypes, dtype, dtype))
    weights = {"w": matrix(0, 96, 96).astype(type_), "v": matrix(1, 96, 64).astype(type_)}
    model, data = with_weights(text, weights), [matrix(i, 8, 96).astype(type_) for i in range(8)]
    quantized = ps.quantize(model, data, size=0.6, threads=1)
    assert {own["type"] for own in quantized.report["layers"]} == {"weights8"}
    assert 0.5 < quantized.report["size"] < 0.6  # of 2 bytes for a weight
    output = ps.compile(quantized.model)(data[0])
    assert output.dtype == type_
    wanted = ps.compile(model)(data[0]).astype(np.float32)
    np.testing.assert_allclose(output.astype(np.float32), wanted, atol=0.05)


def test_goals_are_finite_numbers():
    for name in ("max_error", "time", "size"):
        with pytest.raises(ValueError, match="finite"):
            ps.quantize(feed_forward(), [*rows(2)], **{name: float("inf")})


def test_choice_that_turns_out_slower_is_not_taken(monkeypatch):
    measured = []

    def seconds(sessions, *_):
        """The last measurement of the choice that came first in the search is another one."""
        measured.append(len(sessions))
        return [1.2, 1.0] if len(measured) == 1 else [1.0, 1.0]

    monkeypatch.setattr("penstock.quantizing.quantize.seconds_in_turns", seconds)
    monkeypatch.setattr(
        "penstock.quantizing.search.seconds_in_turns",
        lambda sessions, *_: [0.5, 1.0][-len(sessions) :],
    )
    report = ps.quantize(feed_forward(), [*rows()], max_error=0.1, threads=1).report
    assert len(measured) == 2 and report["time"] == 1.0
    (slow,) = [p for p in report["points"] if p["time"] == 1.2]
    assert not slow["chosen"]


def test_independent_rows_have_no_layers_over_the_range_of_a_run(monkeypatch):
    searches, leave_out = [], Search.leave_out
    monkeypatch.setattr(
        Search, "leave_out", lambda own, type_: searches.append(own) or leave_out(own, type_)
    )
    data = [*rows(8)]
    quantized = ps.quantize(feed_forward(), data, max_error=1e-3, threads=1, independent_rows=True)
    search = searches[0]  # which leaves out bfloat16, too, where the processor does not multiply it
    assert not any("dynamic" in own.types for own in search.layers)
    assert not any("dynamic" in p.choice.values() for p in search.record.points)
    x = np.concatenate([data[0], 50 * data[1]])
    session = ps.compile(quantized.model)
    np.testing.assert_allclose(session(x)[: len(data[0])], session(data[0]), atol=1e-5)
    with pytest.raises(TypeError, match="independent_rows"):
        ps.quantize(feed_forward(), data, independent_rows=1)


def test_deadline_takes_no_choice_slower_than_the_original(monkeypatch):
    monkeypatch.setattr(
        "penstock.quantizing.search.seconds_in_turns",
        lambda sessions, *_: [1.5, 1.0][-len(sessions) :],
    )

    def late(self, *_):
        raise ps.DeadlineExceeded("late")

    monkeypatch.setattr(Search, "measure_errors", late)
    report = ps.quantize(feed_forward(), [*rows()], max_error=2e-3, timeout=100.0).report
    assert len(report["points"]) > 1
    # What is widened when the model is loaded computes the same, whatever was measured.
    assert {own["type"] for own in report["layers"]} == {"weights16"}
