"""The model benchmark: its arithmetic, its tables, its list of models; no peer is run."""

from __future__ import annotations

import math
import subprocess
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import pytest
from bench.cases import chain
from bench.clients import throughput
from bench.disturbed import SHARES, key_of
from bench.disturbed import markdown as disturbed_page
from bench.disturber import disturbed
from bench.exports import RECIPES
from bench.models import CLIENTS, QUICK, Model, models
from bench.peers import ENGINES, PEERS, REFERENCE, environment, installed
from bench.sequences import key_of as sequences_key
from bench.sequences import markdown as sequences_page
from bench.tables import (
    MEMORY_MODELS,
    OURS,
    ClientsRow,
    Row,
    disagreement,
    geometric_mean,
    judged,
    loading,
    outside_table,
    ratio,
    report,
)
from bench.trial import (
    LEAST_SAMPLES,
    MOST_SAMPLES,
    STEPS,
    Job,
    Trial,
    decoded,
    measure,
    sample,
    work,
)
from onnx.helper import tensor_dtype_to_np_dtype

from bench import turns

NAN, INF = math.nan, math.inf


def trials(*seconds: float, loaded: float = 0.5, peak: int = 2**20) -> list[Trial]:
    """A trial of each turn."""
    return [Trial(0.1, loaded, 0.5, median=s, minimum=s / 2, samples=9, peak=peak) for s in seconds]


@pytest.mark.parametrize(
    ("ours", "peers", "want"),
    [
        ([2.0], [[1.0]], 2.0),
        ([2.0], [[4.0], [1.0]], 2.0),
        # Of each turn's ratio, 2, 1 and 0.5, the median: not 3 / 2, the ratio of the medians.
        ([2.0, 3.0, 4.0], [[1.0, 3.0, 8.0], [2.0, 4.0, 9.0]], 1.0),
        ([2.0, 3.0], [[None, 3.0], [4.0, None]], 0.75),
        ([2.0, None], [[4.0, 1.0]], 0.5),
        ([None], [[1.0]], None),
        ([2.0], [[None]], None),
        ([2.0], [], None),
        ([], [[]], None),
    ],
)
def test_a_ratio_is_the_median_of_the_ratios_of_turns(ours, peers, want):
    assert ratio(ours, peers) == want


def test_geometric_mean_of_ratios():
    assert geometric_mean([0.5, None, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([4.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


@pytest.mark.parametrize(
    ("got", "want", "by_norm", "by_element"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0, 0),
        ([[1.1, 10.0]], [[1.0, 10.0]], 0.01, 0.1),
        ([[0.01, -10.0]], [[0.0, -10.0]], 0.001, 1.0),  # zero counts as 10 / 1000
        ([[1.0], [3.0]], [[1.0], [2.0]], 0.5, 0.5),
        ([[NAN, INF, 1.0]], [[NAN, INF, 1.0]], 0, 0),
        ([[NAN, 1.0]], [[1.0, 1.0]], INF, INF),
        ([[1.0, 1.0]], [[NAN, 1.0]], INF, INF),
        ([[-INF]], [[INF]], INF, INF),
        ([[1e-9]], [[0.0]], INF, INF),
        ([[1.0, 2.0]], [[1.0]], INF, INF),
        ([], [[1.0]], INF, INF),
        ([[]], [[]], 0, 0),
        ([[True, False]], [[True, True]], 1.0, 1.0),
    ],
)
def test_disagreement_with_a_peer_is_reported(got, want, by_norm, by_element):
    result = disagreement([np.array(a) for a in got], [np.array(a) for a in want])
    assert result == (pytest.approx(by_norm), pytest.approx(by_element))


@pytest.mark.parametrize(
    ("figure", "bound", "more", "want"),
    [
        (1.0, 1.0, False, "yes"),
        (1.01, 1.0, False, "**no**"),
        (1.01, 1.0, True, "yes"),
        (0.99, 1.0, True, "**no**"),
        (None, 1.0, False, "-"),
        (1.0, None, False, ""),
    ],
)
def test_verdict_follows_from_the_ratio(figure, bound, more, want):
    assert judged(figure, bound, more)[2] == want


def test_rows_compare_with_the_best_peer_in_time_and_memory_and_onnx_runtime_in_loading():
    row = Row(
        "net",
        1,
        {
            OURS: trials(2.0, loaded=0.5, peak=30),
            "onnxruntime": trials(4.0, loaded=1.5, peak=20),
            "openvino": trials(1.0, loaded=0.1, peak=60),
            # What torch makes in the process is no load: its memory is not compared.
            "torch": trials(8.0, loaded=0.0, peak=1),
        },
    )
    assert row.run_ratio == 2.0
    assert row.loading_ratio == 0.5
    assert row.memory_ratio == 1.5


def test_time_outside_of_kernels_is_shown():
    row = Row("net", 1, {OURS: [Trial(minimum=0.010, inside=0.0098), Trial(error="failed")]})
    assert row.outside == pytest.approx(0.02)
    assert Row("net", 1, {OURS: [Trial(minimum=0.010, inside=0.011)]}).outside == 0
    assert Row("net", 1, {"onnxruntime": [Trial(minimum=0.010)]}).outside is None
    small = Row("small", 1, {OURS: [Trial(minimum=0.001, inside=0.0005)]})
    lines = outside_table([row, small])
    assert next(each for each in lines if "net" in each).endswith("| 0.020 | 0.03 | yes |")
    assert not any("small" in each for each in lines[2:])


def test_rows_without_ours_or_without_peers_have_no_ratios():
    for row in (Row("net", 1, {"onnxruntime": trials(1.0)}), Row("net", 1, {OURS: trials(1.0)})):
        assert row.run_ratio is row.loading_ratio is row.memory_ratio is None
    assert loading(Trial(error="no such file")) is None


def test_clients_compare_the_best_numbers_of_threads():
    rates = {
        (OURS, 1): [Trial(rate=10.0), Trial(rate=1.0)],
        (OURS, 2): [Trial(rate=4.0), Trial(rate=8.0)],
        ("onnxruntime", 1): [Trial(rate=5.0), Trial(rate=4.0)],
        ("onnxruntime", 2): [Trial(rate=2.0), Trial(error="failed")],
    }
    assert ClientsRow("net", 4, rates).ratio == 2.0
    rates["openvino-throughput", 2] = [Trial(rate=20.0), Trial(rate=16.0)]
    assert ClientsRow("net", 4, rates).ratio == 0.5
    assert ClientsRow("net", 4, {(OURS, 1): [Trial(rate=1.0)]}).ratio is None


def test_report_has_all_tables():
    rows = [
        Row(
            "net",
            1,
            {OURS: trials(0.001), "onnxruntime": trials(0.002), "openvino": [Trial(error="no")]},
            {OURS: (1e-6, 1e-3)},
        ),
        Row("resnet50", 1, {OURS: trials(0.004), "onnxruntime": trials(0.002)}),
    ]
    throughputs = [
        ClientsRow("net", 2, {(OURS, 1): [Trial(rate=3.0)], ("onnxruntime", 1): [Trial(rate=2.0)]})
    ]
    lines = report(rows, throughputs)
    for line in (
        "| model | threads | penstock | onnxruntime | openvino | ratio | at most | reached |",
        "| net | 1 | 1 (0.5) | 2 (1) | fails | 0.500 | 1.03 | yes |",
        "| resnet50 | 1 | 4 (2) | 2 (1) | - | 2.000 | 1.03 | **no** |",
        "| geometric mean of 2 of 2 | 1 |  |  |  | 1.000 | 0.9 | **no** |",
        "| net | 1 | 500 + 500 | 500 + 500 | fails | 1.000 | 1 | yes |",
        "| net | 1 | 1.0 | 1.0 | fails | 1.000 |  |  |",
        "| resnet50 | 1 | 1.0 | 1.0 | - | 1.000 | 1 | yes |",
        "| net | 1 | 1.0e-06 / 1.0e-03 | fails | fails | 0.0001 | yes |",
        "| net | 2 | 3 | 2 | 1.500 | 1 | yes |",
    ):
        assert line in lines


def test_names_of_models_are_unique_and_known():
    names = [model.name for model in models()]
    assert len(set(names)) == len(names)
    assert {*QUICK, *CLIENTS, *MEMORY_MODELS, *RECIPES} <= set(names)
    assert {model.name for model in models() if model.exported} == set(RECIPES)
    assert not any(model.exported for model in models() if model.quick)  # these need torch


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_models_have_feeds_that_are_the_same_each_time(model: Model):
    first, second = model.feeds(), model.feeds()
    assert first
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype in (np.float32, np.int64, np.int32, np.bool_)
        np.testing.assert_array_equal(array, second[name])


def test_generated_model_takes_its_feeds():
    (model,) = [model for model in models() if model.name == "inception"]
    inputs = onnx.load(model.path()).graph.input
    assert {
        i.name: (
            tuple(d.dim_value for d in i.type.tensor_type.shape.dim),
            tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type),
        )
        for i in inputs
    } == {name: (array.shape, array.dtype) for name, array in model.feeds().items()}


def test_engines_are_all_peers_without_telemetry():
    others = {OURS + "-native", "onednn", OURS + "-shapes", REFERENCE, "openvino-throughput"}
    assert {OURS, *others, *PEERS, "litert"} == set(ENGINES)
    assert installed(OURS)
    assert environment(Path("cache"))["ORT_DISABLE_TELEMETRY"] == "1"
    assert environment(Path("cache"))["TORCHINDUCTOR_CACHE_DIR"].startswith("cache")


def test_short_runs_are_sampled_several_at_a_time():
    runs: list[None] = []
    times = sample(lambda: runs.append(None))
    assert LEAST_SAMPLES <= len(times) <= MOST_SAMPLES
    assert len(runs) > len(times)


def test_throughput_counts_the_runs_of_all_clients():
    runs: list[None] = []
    assert throughput(lambda: runs.append(None), clients=3, seconds=0.01) > 0
    assert len(runs) >= 3


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One run of a small model on the reference."""
    onnx.save(chain(4), tmp_path / "chain.onnx")
    np.savez(tmp_path / "feeds.npz", np.ones(16, np.float32))
    files = (str(tmp_path / name) for name in ("chain.onnx", "feeds.npz", "outputs.npz"))
    path, feeds, outputs = files
    return Job(REFERENCE, 1, path, ["v0"], feeds, outputs, once=True)


def test_trial_runs_in_a_process_of_its_own(job: Job, tmp_path: Path):
    trial = measure(job, tmp_path)
    assert trial.error is None
    assert trial.loaded is not None
    with np.load(job.outputs) as outputs:
        assert [array.shape for array in outputs.values()] == [(16,)]


def test_failed_trial_is_reported_as_a_trial(job: Job, tmp_path: Path):
    Path(job.path).write_bytes(b"no model")
    assert work(job).error
    Path(job.feeds).unlink()
    assert "FileNotFoundError" in measure(job, tmp_path).error


def test_decoders_are_fed_what_they_returned_for_some_steps(monkeypatch):
    monkeypatch.setattr("bench.trial.SECONDS", 0)
    lengths = []

    def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        lengths.append(len(feeds["past"]))
        return [feeds["x"], np.append(feeds["past"], 1)]

    times = decoded(run, {"x": np.zeros(1), "past": np.zeros(3)}, {"past": 1})
    sequence = list(range(3, 3 + STEPS))
    assert lengths == sequence * 2
    assert len(times) == STEPS


def test_runs_are_timed_one_by_one_for_some_seconds(tmp_path):
    onnx.save(chain(2), tmp_path / "chain.onnx")
    np.savez(tmp_path / "feeds.npz", np.ones(16, np.float32))
    job = Job(
        OURS, 1, str(tmp_path / "chain.onnx"), ["v0"], str(tmp_path / "feeds.npz"), seconds=0.01
    )
    trial = work(job)
    assert trial.minimum <= trial.median <= trial.late
    assert trial.samples >= LEAST_SAMPLES


def test_disturber_lasts_as_long_as_the_block(monkeypatch):
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    with disturbed(0.0):
        assert not started
    with disturbed(0.5):
        assert started[0].poll() is None
    assert started[0].poll() is not None


def test_disturbed_rows_are_judged_by_median_and_99th_percentile():
    def row(share: float) -> Row:
        ours = [Trial(median=1.0 + share, late=3.0)]
        return Row("lstm", 2, {OURS: ours, "onnxruntime": [Trial(median=1.0, late=2.0)]})

    lines = disturbed_page({key_of("lstm", share): row(share) for share in SHARES})
    assert [line.count("**no**") for line in lines[-3:]] == [1, 2, 2]
    assert [line.count("| - |") for line in lines[-6:-3]] == [4] * 3  # of another model


class Counted:
    """Rows of one engine that had some turns; each turn takes ten seconds by ``clock``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.order = 0.0, []
        monkeypatch.setattr(turns.time, "monotonic", lambda: self.clock)

    def add(self, key: str, rows: dict[str, Row]) -> None:
        self.clock += 10
        self.order.append(key)
        trials = rows.setdefault(key, Row(key, 2, {OURS: []})).trials[OURS]
        trials.append(Trial(median=1.0))


def pieces(**options) -> turns.Pieces:
    return turns.Pieces(Namespace(**{"keep": None, "turns": 2, "within": None, **options}))


def test_pieces_give_every_row_a_turn_before_one_has_its_second(monkeypatch):
    counted = Counted(monkeypatch)
    assert pieces().measure(["a", "b"], counted.add)
    assert counted.order == ["a", "b", "a", "b"]


def test_pieces_go_on_where_the_time_of_the_last_call_was_up(monkeypatch, tmp_path):
    counted, file = Counted(monkeypatch), tmp_path / "rows.json"
    assert not pieces(keep=file, within=35).measure(["a", "b"], counted.add)
    assert counted.order == ["a", "b", "a"]
    again = pieces(keep=file, within=35)
    assert not again.complete({"a": 2, "b": 2}, [OURS])
    assert again.measure(["a", "b"], counted.add)
    assert counted.order == ["a", "b", "a", "b"]
    assert again.complete({"a": 2, "b": 2}, [OURS])
    assert not again.complete({"a": 1}, [OURS])
    assert not again.complete({"a": 2}, [OURS, "onnxruntime"])
    assert not again.complete({"c": 2}, [OURS])


def test_rows_are_read_as_they_were_written(tmp_path):
    trials = {OURS: [Trial(median=1.0, late=3.0)], "openvino": [Trial(error="none")]}
    rows = {"a": Row("a", 2, trials, {OURS: (1e-6, math.inf)})}
    turns.write(rows, tmp_path / "rows.json")
    assert turns.read(tmp_path / "rows.json") == rows
    assert turns.read(tmp_path / "none.json") == {}


def test_engine_that_failed_is_not_run_again(monkeypatch):
    ran = []
    monkeypatch.setattr(turns, "measure", lambda job, cache: ran.append(job) or Trial(error="no"))
    trials: list[Trial] = []
    for _ in range(3):
        turns.next_trial(trials, Job(OURS, 1, "", [], ""))
    assert (len(ran), len(trials)) == (1, 3)


def test_page_of_sequences_shows_rows_that_were_not_measured():
    row = Row("gpt2 int4, 16 positions", 2, {OURS: [Trial(median=1.0, minimum=0.9)]})
    lines = sequences_page({sequences_key(row.model, 2): row})
    (shown, *_) = [line for line in lines if line.startswith(f"| {row.model} | 2 |")]
    assert "1000 (900)" in shown
    (other, *_) = [line for line in lines if line.startswith(f"| {row.model} | 1 |")]
    assert "1000" not in other
