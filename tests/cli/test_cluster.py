"""``penstock plan --cluster``: forecasts of runs on clusters, by profiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.cli.cluster import read_amount
from tests.support.command_line import as_json, call
from tests.support.saved_models import Net

LINK = ("--bandwidth", "10GB/s", "--latency", "50us")


@pytest.fixture(scope="module")
def convnet(tmp_path_factory) -> Path:
    net, x = Net(), "x"
    for i in range(6):
        x = net.add("Relu", net.conv(x, 8 if i else 3, 8))
    path = tmp_path_factory.mktemp("models") / "convnet.onnx"
    path.write_bytes(net.model(3, x).SerializeToString())
    return path


@pytest.fixture(scope="module")
def profile(convnet, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    document = as_json("profile", str(convnet), "--threads", "1", "--no-trace", *SHAPE)
    for step in document["steps"]:
        step["ms"] = 100.0
    path.write_text(json.dumps(document))
    return path


SHAPE = ("--shape", "x=1x3x16x16")


@pytest.mark.parametrize(
    ("kind", "text", "amount"),
    [
        ("bandwidth", "10GB/s", 1e10),
        ("bandwidth", "1.5 MB/s", 1.5e6),
        ("bandwidth", "25Gbit/s", 3.125e9),
        ("bandwidth", "2KiB/s", 2048.0),
        ("latency", "50us", 50e-6),
        ("latency", "50µs", 50e-6),
        ("latency", "0.2 ms", 0.2e-3),
        ("latency", "1e-4s", 1e-4),
    ],
)
def test_amounts_have_units(kind, text, amount):
    assert read_amount(kind, text) == pytest.approx(amount, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *[("bandwidth", text) for text in ("10", "10GB", "10gb/s", "GB/s", "0GB/s", "-1GB/s", "")],
        *[("latency", text) for text in ("50", "50 us/s", "1.2.3us", "0s", "1e999s", "nan s")],
    ],
)
def test_amounts_without_units_are_refused(kind, text):
    with pytest.raises(ValueError, match=f"is no {kind}: a number and its unit are needed"):
        read_amount(kind, text)


def test_forecast_uses_the_costs_of_the_profile(convnet, profile):
    steps = json.loads(profile.read_text())["steps"]
    asked = ("plan", str(convnet), *SHAPE, *LINK, "--cost", str(profile))
    total = 0.1 * len(steps)
    for workers, interval in ((1, total), (2, total / 2), (1000, total / 6)):
        result = as_json(*asked, "--cluster", str(workers))
        assert result["serial"] == pytest.approx(total)
        assert result["makespan"] == pytest.approx(total, rel=0.1)
        assert result["interval"] == pytest.approx(interval, rel=0.2)
        assert result["used"] == len(result["loads"]) <= min(workers, 12)
        assert result["bottleneck"]["bound_by"] == "computing"
        assert sum(row["nodes"] for row in result["loads"]) == 12
    ends = [{entry["source"], entry["target"]} for entry in result["traffic"]]
    assert sum("driver" in pair for pair in ends) == 2
    assert result["traffic_bytes"] == sum(entry["bytes"] for entry in result["traffic"])
    text = call(*asked, "--cluster", "1000").output
    assert f"{result['used']} of 1000 have nodes" in text
    assert f"by {profile}" in text


def test_forecast_of_workers_that_share_cores_is_bound_by_these(convnet, profile):
    asked = ("plan", str(convnet), *SHAPE, *LINK, "--cost", str(profile), "--cluster", "6")
    apart, shared = as_json(*asked), as_json(*asked, "--cores", "2")
    assert apart["used"] == 6
    assert shared["used"] == 2
    assert shared["interval"] == pytest.approx(shared["serial"] / 2, rel=0.01)
    named = [f"node:{n.name}" for n in ps.load(convnet).graph.nodes]
    pins = [("--place", f"{name}=/job:worker/task:{i // 2}") for i, name in enumerate(named)]
    result = as_json(*asked, *[text for pin in pins for text in pin], "--cores", "2")
    assert result["used"] == 6
    assert result["bottleneck"] == {"worker": None, "bound_by": "cores", "load": result["interval"]}
    assert (
        "bottleneck   the cores that workers share"
        in call(*asked, *[text for pin in pins for text in pin], "--cores", "2").output
    )
    alone = call("plan", str(convnet), "--cores", "2")
    assert "--cores is for --cluster" in alone.output


def test_profile_that_a_session_made_is_read(convnet, tmp_path):
    session = ps.compile(convnet, threads=2)
    made = session.profile({"x": np.ones((1, 3, 16, 16), np.float32)}, runs=2)
    made.save(tmp_path / "p.json")
    cluster = ps.SimulatedCluster(2, bandwidth=1e9, latency=1e-9, profile=tmp_path / "p.json")
    forecast = ps.compile(convnet, cluster=cluster).inspect.forecast_on_cluster(
        {"x": (1, 3, 16, 16)}
    )
    inside = sum(row.seconds for row in made.steps()) / made.runs
    assert sum(forecast.computing) == pytest.approx(inside)
    asked = ("plan", str(convnet), *SHAPE, *LINK, "--cost", str(tmp_path / "p.json"))
    note = as_json(*asked, "--cluster", "2").get("note", "")
    assert ("profile with --threads 1" in note) == (made.steps()[0].threads > 1)


def test_slow_links_bound_a_placement_that_is_given(convnet, profile):
    names = [node.name for node in ps.load(convnet).graph.nodes]
    places = [
        part
        for i, name in enumerate(names)
        for part in ("--place", f"node:{name}=/job:worker/task:{3 * (i % 2)}")
    ]
    asked = ("plan", str(convnet), *SHAPE, "--cost", str(profile), "--cluster", "4", *places)
    result = as_json(*asked, "--bandwidth", "1kB/s", "--latency", "1ms")
    assert [row["worker"] for row in result["loads"]] == [0, 3]
    assert result["bottleneck"]["bound_by"] == "messages"
    assert result["makespan"] > 5 * result["serial"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cluster", "2"], "--cluster needs --bandwidth and --latency"),
        (["--cost", "PROFILE"], "--cost is for --cluster"),
        (["--objective", "latency"], "--objective is for --cluster"),
        (["--cluster", "0", *LINK], "0 is not in the range"),
        (["--cluster", "2", *LINK, "--source"], "name one"),
        (["--cluster", "2", "--bandwidth", "10", "--latency", "1us"], "is no bandwidth"),
    ],
)
def test_options_that_do_not_fit_are_refused(convnet, profile, arguments, reason):
    given = [str(profile) if each == "PROFILE" else each for each in arguments]
    result = call("plan", str(convnet), *SHAPE, *given)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "has no list 'steps'"),
        ('{"steps": []}', "has no list 'steps'"),
        ('{"steps": [3]}', "must be an object"),
        ('{"steps": [{"nodes": [1], "ms": 1}]}', "'nodes' must be a list of names"),
        ('{"steps": [{"nodes": ["a"], "ms": -1}]}', "'ms' must be a number"),
        ('{"steps": [{"nodes": ["a"], "ms": NaN}]}', "'ms' must be a number"),
        ('{"steps": [{"nodes": ["a"], "ms": 1, "threads": 0}]}', "'threads' must be"),
        ('{"steps": [{"nodes": ["a"], "ms": 1}]}', "a profile of another model"),
    ],
)
def test_files_that_are_no_profile_of_the_model_are_refused(convnet, tmp_path, content, reason):
    path = tmp_path / "p.json"
    path.write_text(content)
    result = call("plan", str(convnet), *SHAPE, *LINK, "--cluster", "2", "--cost", str(path))
    assert result.exit_code == 1
    assert reason in result.output


def test_simulated_cluster_runs_nothing(convnet):
    cluster = ps.SimulatedCluster(2, bandwidth=1e9, latency=1e-6)
    session = ps.compile(convnet, cluster=cluster)
    with pytest.raises(ps.Unsupported, match="forecast_on_cluster"):
        session.run({"x": np.ones((1, 3, 16, 16), np.float32)})
    with pytest.raises(ps.InvalidInput, match="shapes="):
        session.inspect.forecast_on_cluster()
    with pytest.raises(ps.PenstockError, match="has no cluster"):
        ps.compile(convnet).inspect.forecast_on_cluster()
    for wrong in ({"bandwidth": 0}, {"latency": -1.0}, {"objective": "speed"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ps.SimulatedCluster(2, **{"bandwidth": 1e9, "latency": 1e-6, **wrong})
