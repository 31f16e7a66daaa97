"""``penstock.quantize``."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text
from tests.support.quantizable import convolutional, feed_forward, images, rows


def test_written_model_keeps_the_error_on_samples_held_out(tmp_path):
    data = images(12)
    quantized = ps.quantize(convolutional(), [*data], max_error=0.02, threads=1)
    quantized.save(tmp_path / "q.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx")
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
    (theirs,) = onnxruntime.InferenceSession(quantized.onnx).run(None, {"x": x})
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


def test_metric_bounds_the_error():
    calls = []

    def metric(wanted, outputs):
        calls.append(len(wanted))
        return float(
            max(np.abs(a["y"] - b["y"]).max() for a, b in zip(wanted, outputs, strict=True))
        )

    quantized = ps.quantize(feed_forward(), [*rows()], max_error=0.3, metric=metric)
    assert calls and quantized.report["error"] <= 0.3


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
    assert again["points"][: len(measured["points"])] == measured["points"]
    assert again["seconds"] == measured["seconds"]
    assert "record ranges" not in steps
    with pytest.raises(ps.InvalidInput, match="another model"):
        ps.quantize(feed_forward(), [*rows(4)], max_error=0.05, resume=path)
    with pytest.raises(ps.InvalidInput, match="other samples"):
        ps.quantize(feed_forward(), [*rows()[:-1], rows()[0]], max_error=0.05, resume=path)
    with pytest.raises(ps.InvalidInput, match="other options"):
        metric = {"max_error": 0.05, "metric": lambda one, other: 0.0}
        ps.quantize(feed_forward(), [*rows()], resume=path, **metric)


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
