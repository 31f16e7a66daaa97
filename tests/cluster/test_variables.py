"""Variables of sessions on workers."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import ray

import penstock as ps
from tests.cluster.test_cluster import convnet, halves
from tests.support.tf_graphs import Flow, Shape, Type
from tests.support.timing import SOON, wait_until


@pytest.fixture(scope="module")
def session(cluster):
    source = convnet()
    return ps.compile(source, cluster=cluster, place=halves(source))


def counter(read_on: int) -> bytes:
    """A variable that each run of ``add`` adds to, on worker 0, and is read on ``read_on``."""
    g = Flow()
    v = g.node("VarHandleOp", name="v", dtype=Type("float32"), shape=Shape([]), shared_name="v")
    g.node("AssignVariableOp", v, g.const(np.float32(1)), name="init", dtype=Type("float32"))
    g.node("AssignAddVariableOp", v, g.const(np.float32(2)), name="add", dtype=Type("float32"))
    w = g.node("VarHandleOp", name="w", dtype=Type("float32"), shape=Shape([]), shared_name="v")
    g.node("ReadVariableOp", w, name="read", dtype=Type("float32"))
    for node in g.proto.node:
        node.device = f"/job:worker/task:{read_on if node.name in ('w', 'read') else 0}"
    return g.bytes()


def test_variable_is_shared_by_the_signatures_of_a_session(cluster):
    session, other = [ps.compile(counter(0), cluster=cluster) for _ in range(2)]
    session.run(targets=["init"], fetches=[], timeout=SOON)
    for _ in range(2):
        session.run(targets=["add"], fetches=[], timeout=SOON)
    assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 5
    with pytest.raises(ps.RunError, match="before it is initialized"):
        other.run(fetches=["read:0"], timeout=SOON)


def test_variable_on_two_workers_is_refused(cluster):
    session = ps.compile(counter(1), cluster=cluster)
    session.run(targets=["init"], fetches=[], timeout=SOON)
    with pytest.raises(ps.InvalidModel, match=r"'v' is used on .*task:0.* and on .*task:1"):
        session.run(fetches=["read:0"], timeout=SOON)


def test_session_does_not_see_the_variables_of_another_after_one_is_gone(cluster):
    """Workers know stores by numbers, which must not be given twice."""

    def value(session: ps.Session) -> float:
        return session.run(fetches=["read:0"], timeout=SOON)["read:0"]

    first, second = [ps.compile(counter(0), cluster=cluster) for _ in range(2)]
    first.variables["v"] = 4
    second.variables["v"] = 40
    assert (value(first), value(second)) == (4, 40)
    del first
    gc.collect()
    third = ps.compile(counter(0), cluster=cluster)
    third.variables["v"] = 400
    assert (value(second), value(third)) == (40, 400)


def test_workers_keep_no_variables_of_sessions_that_are_gone(cluster):
    actors = [member.actor for member in cluster._members.members]

    def stores() -> int:
        cluster._forget()
        calls = [actor.__ray_call__.remote(lambda worker: len(worker._stores)) for actor in actors]
        return sum(ray.get(calls))

    gc.collect()
    wait_until(lambda: stores() == 0)
    sessions = [ps.compile(counter(0), cluster=cluster) for _ in range(3)]
    for session in sessions:
        session.run(targets=["init"], fetches=[], timeout=SOON)
    assert stores() == len(cluster._variables.homes) == 3
    del sessions, session
    gc.collect()
    wait_until(lambda: stores() == 0)
    assert not cluster._variables.homes
