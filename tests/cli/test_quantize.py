"""``penstock quantize``."""

import json
import sys

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import penstock as ps
from penstock.cli.commands import main
from penstock.cli.quantize import metric_of
from penstock.core.checkpoints import cancelled_by
from penstock.host.stop_condition import StopCondition
from tests.support.quantizable import feed_forward, rows
from tests.support.tflite_networks import convolutional, images


@pytest.fixture
def files(tmp_path):
    onnx.save(feed_forward(), tmp_path / "m.onnx")
    np.save(tmp_path / "data.npy", rows())
    return tmp_path


def call(folder, *arguments: str) -> Result:
    given = ["quantize", str(folder / "m.onnx"), "--data", str(folder / "data.npy")]
    given += ["-o", str(folder / "out.onnx"), *arguments]
    return CliRunner().invoke(main, given, catch_exceptions=False)


def test_model_is_written_with_a_report(files):
    result = call(files, "--max-error", "0.05", "--report", str(files / "r.html"), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["error"] <= 0.05
    assert {own["name"] for own in document["layers"]} == {"up", "down"}
    assert "<svg" in (files / "r.html").read_text()
    x = rows()[0]
    np.testing.assert_allclose(
        ps.compile(files / "out.onnx")(x), ps.compile(files / "m.onnx")(x), atol=0.3
    )


def test_text_names_layers_and_points(files):
    text = call(files).stdout
    assert "out.onnx: time " in text and "up " in text and "codes everywhere" in text


def test_model_is_not_replaced_by_its_own_codes(files):
    before = (files / "m.onnx").read_bytes()
    result = call(files, "-o", str(files / "m.onnx"))
    assert result.exit_code == 2 and "is the model itself" in result.output
    assert (files / "m.onnx").read_bytes() == before


def test_goal_that_cannot_be_met_ends_with_1(files):
    result = call(files, "--size", "0.01")
    assert result.exit_code == 1
    assert "possible are" in result.output
    assert not (files / "out.onnx").exists()


@pytest.mark.costly
def test_metric_is_a_program(files):
    script = files / "metric.py"
    script.write_text(
        "import sys, numpy, pathlib\n"
        "one, other = map(pathlib.Path, sys.argv[1:])\n"
        "names = sorted(p.name for p in one.iterdir())\n"
        "assert names == sorted(p.name for p in other.iterdir()) and names\n"
        "print('looked at', len(names))\n"
        "print(max(abs(numpy.load(one / n)['y'] - numpy.load(other / n)['y']).max() for n in names))\n"
    )
    result = call(files, "--metric", f"{sys.executable} {script}", "--max-error", "0.4", "--json")
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.stdout)["error"] <= 0.4


def test_faults_of_a_metric_are_shown(files):
    result = call(files, "--metric", "no-such-program", "--max-error", "1")
    assert result.exit_code == 1 and "cannot be run" in result.output
    result = call(files, "--metric", f"{sys.executable} -c print('x')", "--max-error", "1")
    assert result.exit_code == 1 and "must print a number" in result.output
    result = call(files, "--metric", "measure 'it", "--max-error", "1")
    assert result.exit_code == 1 and "is no command" in result.output
    result = call(files, "--metric", "true")
    assert result.exit_code == 2 and "--max-error" in result.output


def test_program_that_hangs_is_ended_where_the_work_must_stop():
    metric = metric_of(f"{sys.executable} -c 'import time; time.sleep(600)'")
    with pytest.raises(ps.DeadlineExceeded), cancelled_by(StopCondition(0.1, None, "quantizing")):
        metric([{"y": np.zeros(1)}], [{"y": np.zeros(1)}])


def test_wrong_samples_are_a_fault_of_the_input(files):
    np.savez(files / "data.npz", other=rows())
    given = ["quantize", str(files / "m.onnx"), "--data", str(files / "data.npz")]
    result = CliRunner().invoke(main, [*given, "-o", str(files / "out.onnx")])
    assert result.exit_code == 1 and "lacks 'x'" in result.output


def test_tflite_files_become_tflite_files(files):
    source, output = files / "m.tflite", files / "out.tflite"
    source.write_bytes(convolutional())
    np.save(files / "data.npy", images(8))
    given = ["quantize", str(source), "--data", str(files / "data.npy"), "-o", str(output)]
    result = CliRunner().invoke(main, [*given, "--max-error", "0.02", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["error"] <= 0.02 and document["output"] == str(output)
    assert output.read_bytes()[4:8] == b"TFL3"
    x = images(1)[0]
    np.testing.assert_allclose(ps.compile(output)(x), ps.compile(source)(x), atol=0.1)


def test_tflite_file_of_another_format_is_a_fault_of_the_input(files):
    result = call(files, "-o", str(files / "out.tflite"))
    assert result.exit_code == 1
    assert "m.onnx is no TFLite file" in result.output and "write ONNX" in result.output
