"""Which worker has which variable."""

from __future__ import annotations

import gc

import pytest

import penstock as ps
from penstock.cluster.driver_state import VariableHomes
from penstock.ops.tensorflow.state import Store

DEVICES = ["/job:worker/task:0", "/job:worker/task:1"]


def test_variable_has_the_worker_that_names_it_first() -> None:
    homes, store = VariableHomes(), Store()
    assert homes.find(store, "v") is None
    number = homes.number(store)
    assert homes.settle((number, "v"), 1, DEVICES)
    assert not homes.settle((number, "v"), 1, DEVICES)
    assert homes.find(store, "v") == (1, number)
    with pytest.raises(ps.InvalidModel, match=r"'v' is used on .*task:1 and on .*task:0"):
        homes.settle((number, "v"), 0, DEVICES)


def test_variables_of_a_graph_that_no_worker_has_are_forgotten() -> None:
    homes, store = VariableHomes(), Store()
    homes.settle((homes.number(store), "v"), 0, DEVICES)
    homes.unsettle([(store, "v")])
    assert homes.find(store, "v") is None


def test_store_that_is_gone_leaves_its_number_and_no_other_store_has_it() -> None:
    homes, store = VariableHomes(), Store()
    number = homes.number(store)
    homes.settle((number, "v"), 0, DEVICES)
    del store
    gc.collect()
    assert list(homes.forgotten) == [number]
    homes.forget([number])
    assert homes.homes == {}
    assert homes.number(Store()) != number
