"""The benchmark of control flow: its graphs, its jobs, its table; TensorFlow is not run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.frames import (
    EXECUTORS,
    Case,
    Row,
    absent,
    cases,
    chain,
    loop,
    main,
    markdown,
    measure_case,
    measured,
)
from bench.frames_trial import Job, timed

import penstock as ps

SMALL = Case("loop", "us", loop(1)[0], {"n": ("int32", 3)}, loop(1)[1], per=3, target=2.5)


def test_loop_cases_compute_their_sums() -> None:
    for variables in (1, 4):
        graph, fetch = loop(variables)
        trace = ps.Trace()
        session = ps.compile(graph, executor="frames", backends=["numpy"])
        outputs = session.run({"n": np.int32(5)}, [fetch], trace=trace)
        assert outputs[fetch] == 5 * (1 + sum(range(1, variables)))
        assert trace.counts["while/cond"] == 6
        assert sum(k for name, k in trace.counts.items() if name.endswith("/next")) == 5 * variables


def test_a_chain_has_as_many_nodes_as_it_says() -> None:
    graph, fetch = chain(10)
    session = ps.compile(graph, executor="frames", backends=["numpy"])
    trace = ps.Trace()
    assert session.run({"x": np.float32(1)}, [fetch], trace=trace)[fetch] == 11
    assert trace.counts == {f"add{i}": 1 for i in range(10)}


@pytest.mark.costly
@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_case_of_frames_runs(executor: str, tmp_path: Path) -> None:
    for case in cases():
        if executor not in case.executors or (case.options.get("wait_s") and "16" not in case.name):
            continue
        path = tmp_path / "graph.pb"
        path.write_bytes(case.graph)
        few = {**case.options, "calls": 1, "repetitions": 1}
        feeds = {name: (kind, min(value, 16)) for name, (kind, value) in case.feeds.items()}
        job = Job(f"penstock:{executor}", str(path), feeds, case.fetch, **few)
        result = timed(job)
        assert result["by"]
        assert len(result["seconds"]) == 1


def test_frames_job_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    row = measure_case(SMALL, tmp_path, measured(None), (), turns=1)
    assert not row.errors
    assert row.by["penstock:frames"] == "frames"
    assert [len(row.values[f"penstock:{executor}"]) for executor in EXECUTORS] == [1, 1]


def test_failed_job_is_not_repeated(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(job: Job) -> Mapping[str, Any]:
        asked.append(job.engine)
        if job.engine == "tensorflow":
            return {"error": "no such operation"}
        return {"seconds": [3e-6, 6e-6, 9e-6], "by": "frames"}

    row = measure_case(SMALL, tmp_path, measure, ["tensorflow"], turns=2)
    assert asked == ["penstock:auto", "penstock:frames", "tensorflow", *asked[:2]]
    assert row.values == {f"penstock:{each}": [2.0, 2.0] for each in EXECUTORS}
    assert row.errors == {"tensorflow": "no such operation"}
    lines = markdown([row], 2, None)
    assert "| loop | us |  | 2 |  | 2 |  | 2.5 |" in lines
    assert "loop: auto runs it on frames." in lines
    assert "loop, tensorflow: no such operation" in lines


def test_a_ratio_is_the_median_of_those_of_turns() -> None:
    row = Row(SMALL)
    row.values = {"penstock:frames": [2.0, 3.0, 4.0], "tensorflow": [1.0, 3.0, 8.0]}
    assert row.ratio("penstock:frames") == 1.0
    assert row.ratio("penstock:auto") is None
    row.by = {"tensorflow": "tensorflow 2.21.0"}
    lines = markdown([row], 3, None)
    assert "| loop | us | 3 |  |  | 3 | 1 | 2.5 |" in lines
    assert any("tensorflow 2.21.0" in line for line in lines)


def test_error_of_a_job_process_is_reported() -> None:
    job = Job("penstock:frames", "no_such_graph.pb", {}, "x")
    assert "no_such_graph.pb" in measured(None)(job)["error"]


def test_without_tensorflow_its_column_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "make bench-tf" in str(absent(tmp_path / "python"))
    # nothing is measured, so that nothing is written
    monkeypatch.setattr(
        sys, "argv", ["frames", "--tensorflow", str(tmp_path / "python"), "--only", "nothing"]
    )
    main()
    assert "TensorFlow is left out" in capsys.readouterr().err
    lines = markdown([Row(SMALL, {"penstock:frames": [2.0]})], 1, absent(tmp_path / "python"))
    assert any("TensorFlow is left out" in line for line in lines)


def test_jobs_are_exchanged_as_json() -> None:
    job = Job("tensorflow", "graph.pb", {"n": ("int32", 3)}, "y", devices=2)
    again = Job(**json.loads(json.dumps(job.__dict__)))
    assert again.devices == 2
    assert tuple(again.feeds["n"]) == ("int32", 3)
