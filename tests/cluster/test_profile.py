"""Profiles of runs on a cluster, which its workers measure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.observers.profile import Profile
from tests.cluster.test_cluster import answer, convnet, halves, images
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import counting


@pytest.fixture(scope="module")
def session(cluster):
    source = convnet()
    return ps.compile(source, cluster=cluster, place=halves(source), backends=["numpy"])


def test_profile_has_the_steps_of_all_workers(session, cluster, tmp_path: Path) -> None:
    wanted = answer(session, images())
    profile = session.profile({"x": images()}, runs=3)
    assert profile.runs == 3 and len(profile.alone) == 3
    by_worker = {row.name: row.count for row in profile.by_worker()}
    # Six convolutions and as many Relus, half of them on each worker.
    assert by_worker == dict.fromkeys(cluster.devices, 3 * 6)
    assert {row.name: row.count for row in profile.by_operation()} == {"Conv": 18, "Relu": 18}
    assert sum(row.share for row in profile.steps()) == pytest.approx(1)
    assert {row.threads for row in profile.steps()} == {cluster.threads}
    assert profile.inside == pytest.approx(sum(row.seconds for row in profile.steps()))
    assert ">worker<" in profile._repr_html_()
    profile.save(tmp_path / "profile.json")
    steps = json.loads((tmp_path / "profile.json").read_text())["steps"]
    assert {step["worker"] for step in steps} == {*cluster.devices}
    np.testing.assert_array_equal(answer(session, images()), wanted)  # nothing is measured now


def test_profile_counts_the_iterations_of_loops_over_workers(cluster) -> None:
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"))
    for node in b.proto.node:
        node.device = f"/job:worker/task:{int(node.op == 'Neg')}"
    session = ps.compile(b.bytes(), cluster=cluster)
    session.run({"n": np.int32(4)}, [total])
    executor = next(iter(session._plans.executors()))
    profile = executor.profile([np.int32(4)], 2)
    rows = [row for row in profile.steps() if row.facts.operation == "Neg"]
    assert [(row.worker, row.count) for row in rows] == [(cluster.devices[1], 2 * 4)]


def test_effective_backends_are_those_of_workers(session) -> None:
    answer(session, images())
    assert session.effective.backends == ("numpy",)


def test_simulations_of_the_plan_name_what_to_ask_on_a_cluster(session) -> None:
    answer(session, images())
    for simulate in (session.inspect.schedule, lambda: session.inspect.forecast(2)):
        with pytest.raises(ps.PenstockError, match=r"forecast_on_cluster\(\) .* profile\(\)"):
            simulate()


def test_profiles_of_a_cluster_add_up_and_have_no_steps_of_this_process(session) -> None:
    one, other = (session.profile({"x": images()}, runs=runs) for runs in (1, 2))
    seconds = one.inside + other.inside
    one.add(other)
    assert one.runs == len(one.alone) == 3
    assert {row.count for row in one.steps()} == {3} and len(one.steps()) == 12
    assert one.inside == pytest.approx(seconds)
    for add in (lambda: one.add(Profile()), lambda: Profile().add(one)):
        with pytest.raises(TypeError):
            add()
