"""Tables are filled by the nodes of a model, or refused."""

from __future__ import annotations

import pytest

import penstock as ps
from tests.frontends.tflite.test_rules_stablehlo import RESOURCE
from tests.support.tflite_models import model, subgraph


def test_table_that_nothing_fills_is_refused() -> None:
    made = ("HASHTABLE", [], ["t"], ("HashtableOptions", {"table_id": 3}))
    find = ("HASHTABLE_SIZE", ["t"], ["n"], ("HashtableSizeOptions", {}))
    graph = subgraph({}, [made, find], ["n"], t=RESOURCE)
    with pytest.raises(ps.InvalidModel, match="reads a table that nothing has filled"):
        ps.load(model([graph]))
