"""Which inputs of a graph are masks."""

from __future__ import annotations

import onnx.parser
import pytest

import penstock as ps
from penstock.analysis.masks import masks_of
from tests.passes.lowering.test_pack_rows import ATTEND, EMBED, MASK, MEAN, model_of

MODEL = model_of(EMBED, MASK, ATTEND, MEAN)


def test_inputs_are_told_for_masks_by_what_is_computed_of_them():
    assert masks_of(ps.load(MODEL).graph, (0, 1)) == (1,)


@pytest.mark.parametrize("mask", ["", "mask"])
def test_caches_of_attention_are_no_masks(mask):
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[1, 2, 8] q, float[1, 2, 3] mask, float[1, 2, 1, 4] k, float[1, 2, 1, 4] v)
        => (float[1, 2, 8] y, float[1, 2, 3, 4] key, float[1, 2, 3, 4] value)
        {{ y, key, value = Attention <q_num_heads = 2, kv_num_heads = 2> (q, q, q, {mask}, k, v) }}"""
    masks = masks_of(ps.load(onnx.parser.parse_model(text)).graph, (0, 1, 2, 3))
    assert masks == ((1,) if mask else ())
