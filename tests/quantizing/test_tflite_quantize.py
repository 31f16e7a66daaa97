"""``penstock.quantize`` of TFLite files as TFLite files."""

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.writer import fields_of, serialized
from tests.support.litert import by_litert
from tests.support.quantizable import convolutional as onnx_model
from tests.support.tflite_cases import FOLDER
from tests.support.tflite_networks import convolutional, feed_forward, images, rows


def tensors(data: bytes) -> list:
    with opened_model(data, "m") as (table, weights):
        return fields_of(table, weights)["subgraphs"][0]["tensors"]


def rms(outputs, wanted) -> float:
    return np.sqrt(np.square(outputs - wanted).mean(axis=tuple(range(1, wanted.ndim)))).max()


@pytest.mark.costly
@pytest.mark.parametrize(("make", "data"), [(convolutional, images), (feed_forward, rows)])
def test_written_file_keeps_the_error_on_samples_held_out(make, data, tmp_path):
    (tmp_path / "m.tflite").write_bytes(make())
    samples, path = data(12), tmp_path / "q.tflite"
    quantized = ps.quantize(tmp_path / "m.tflite", [*samples], size=0.5, output=path, threads=1)
    assert path.read_bytes() == quantized.tflite
    report, session = quantized.report, ps.compile(path)
    held = samples[3::4]
    wanted = np.stack([by_litert(make(), {"x": x})[0] for x in held])
    ours = np.stack([session(x) for x in held])
    theirs = np.stack(
        [by_litert(path.read_bytes(), {"x": x}, resolver="BUILTIN_REF")[0] for x in held]
    )
    spread = np.ptp([by_litert(make(), {"x": x})[0] for x in samples])
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert rms(ours, wanted) <= 1.05 * report["error"] * spread + 1e-6
    assert report["size"] <= 0.5 and report["error"] < 0.03
    assert path.stat().st_size < 0.6 * len(make())
    assert {own["name"] for own in report["layers"]} >= {
        "FULLY_CONNECTED_0"
    } or make is convolutional


def test_bound_is_kept_by_layers_that_stay_float():
    data = [*images(8)]
    quantized = ps.quantize(convolutional(), data, max_error=0.001, output=None, threads=1)
    assert quantized.report["error"] <= 0.001
    with pytest.raises(ps.PenstockError, match=r"output='NAME.tflite'"):
        _ = quantized.tflite


def test_samples_of_other_dims_than_the_onnx_file_has_are_refused_by_name(monkeypatch):
    data = [*images(4)]
    data[2] = np.concatenate([data[2], data[2]])
    monkeypatch.setattr("penstock.quantizing.search.observe", None)  # before the search begins
    with pytest.raises(ps.InvalidInput, match=r"sample 2: input 'x' must have 1 at axis 0"):
        ps.quantize(convolutional(), data, size=0.6, threads=1)


def test_tflite_with_a_bound_is_within_it(tmp_path):
    quantized = ps.quantize(
        convolutional(), [*images(8)], max_error=0.002, output=tmp_path / "q.tflite", threads=1
    )
    assert quantized.report["error"] <= quantized.report["error_limit"] <= 0.002
    tried = [p for p in quantized.report["points"] if p["error_limit"] > 0.002]
    assert tried  # not everything fits


def test_subgraph_of_a_signature_keeps_its_names(tmp_path):
    (number,) = [i for i, own in enumerate(tensors(convolutional())) if own["name"] == "y"]
    signature = {
        "inputs": [{"name": "image", "tensor_index": 0}],
        "outputs": [{"name": "scores", "tensor_index": number}],
        "signature_key": "classify",
    }
    path, output = tmp_path / "m.tflite", tmp_path / "q.tflite"
    path.write_bytes(convolutional(signature_defs=[signature]))
    data = [{"image": x} for x in images(4)]
    model = ps.load(path, signature="classify")
    ps.quantize(model, data, size=0.6, output=output, threads=1)
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(str(output))
    theirs = interpreter.get_signature_runner("classify")(**data[0])
    ours = ps.compile(output, signature="classify").run(data[0])
    assert ours.keys() == theirs.keys() == {"scores"}
    np.testing.assert_allclose(ours["scores"], theirs["scores"], atol=0.02)


def test_search_is_resumed_for_the_same_format_alone(tmp_path):
    record, options = tmp_path / "r.json", {"size": 0.5, "threads": 1}
    ps.quantize(feed_forward(), [*rows(4)], output=tmp_path / "a.tflite", resume=record, **options)
    steps = []
    ps.quantize(
        feed_forward(),
        [*rows(4)],
        output=tmp_path / "b.tflite",
        resume=record,
        progress=lambda step, *_: steps.append(step),
        **options,
    )
    assert "record ranges" not in steps
    with pytest.raises(ps.InvalidInput, match="another model"):
        ps.quantize(
            feed_forward(), [*rows(4)], output=tmp_path / "b.onnx", resume=record, **options
        )


def test_other_models_are_refused(tmp_path):
    output, x = tmp_path / "q.tflite", images(1, 0).transpose(0, 1, 4, 2, 3)
    for source in (onnx_model(), ps.load(onnx_model()), serialized({"version": 3}, b"CIR0")):
        with pytest.raises(ps.PenstockError, match=r"TFLite file|subgraphs"):
            ps.quantize(source, [*x], output=output)
    (tmp_path / "m.onnx").write_bytes(onnx_model().SerializeToString())
    with pytest.raises(ps.InvalidInput, match=r"m.onnx is no TFLite file.*write ONNX"):
        ps.quantize(tmp_path / "m.onnx", [*x], output=output)
    assert not output.exists()


def test_output_in_a_folder_that_is_missing_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="folder that does not exist"):
        ps.quantize(feed_forward(), [*rows(4)], output=tmp_path / "none" / "q.tflite")


def test_int8_file_stays_as_it_is(tmp_path):
    path, output = FOLDER / "quant" / "converted_float_io.tflite", tmp_path / "q.tflite"
    (x,) = ps.load(path).graph.inputs
    data = [np.full(x.type.shape, i, x.type.dtype) for i in range(4)]
    quantized = ps.quantize(path, data, output=output)
    assert quantized.report["layers"] == []
    assert tensors(output.read_bytes()) == tensors(path.read_bytes())
