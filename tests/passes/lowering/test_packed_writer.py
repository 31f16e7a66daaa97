"""The graph for packed rows: what is read outside of it, and tables that repeat for each sample."""

from __future__ import annotations

import numpy as np
import onnx

import penstock as ps
from tests.passes.lowering.test_pack_rows import (
    BATCH,
    HEADS,
    SIZE,
    WEIGH,
    feeds_of,
    operations,
    packed,
    reference,
)
from tests.passes.lowering.test_padded_attention import RELATIVE, RNG, TABLES, related


def test_result_of_attention_is_an_output_with_0_in_rows_left_out():
    model = related(RELATIVE, "s = Add (s9, bias)", WEIGH, behind="", output="y")
    session, feeds = packed(model, dead_rows="any"), feeds_of()
    (y,) = session.run(feeds).values()
    assert not y[feeds["mask"] == 0].any()
    transposed = related(RELATIVE, "s = Add (s9, bias)", WEIGH, behind="", output="ct")
    session = ps.compile(transposed, cache=False, dead_rows="any")
    (y,) = session.run(feeds).values()
    keep = feeds["mask"] != 0
    np.testing.assert_allclose(y[keep], reference(transposed, feeds)[keep], rtol=1e-5, atol=1e-5)
    assert not y[~keep].any()
    assert operations(session)["LiveRows"] == 1


def test_tables_for_each_sample_are_not_those_of_the_first():
    model = onnx.load_model_from_string(related(RELATIVE, "s = Add (s9, bias)", WEIGH))
    del model.graph.initializer[-2:]
    tables = {**TABLES, "places_t": RNG.normal(size=(BATCH, HEADS, SIZE, 8)).astype(np.float32)}
    for name, table in tables.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    packed(model.SerializeToString())
