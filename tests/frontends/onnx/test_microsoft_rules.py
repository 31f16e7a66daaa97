"""The rules for operations of ONNX Runtime, all together: which there are, and misfit nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.onnx.upgrades import microsoft_rules
from penstock.ops.registry import MICROSOFT
from tests.support.contrib import contrib_model
from tests.support.random_arrays import normal

rng = np.random.default_rng(0)
draw = partial(normal, rng)


def test_rules_that_are_imported_late_are_for_no_operation_of_penstock() -> None:
    from penstock.frontends.onnx import microsoft, microsoft_attention
    from penstock.frontends.onnx.upgrades import _microsoft_rule
    from penstock.ops.families import MODULES

    for domain, name in MODULES:
        rule = _microsoft_rule(name, domain)
        assert rule is microsoft_rules().get((domain, name))
        modules = (microsoft.__name__, microsoft_attention.__name__)
        assert rule is None or rule.__module__ in modules
    assert _microsoft_rule("QLinearAdd", MICROSOFT) is not None


@pytest.mark.parametrize(
    "op", sorted(name for domain, name in microsoft_rules() if domain == MICROSOFT)
)
@pytest.mark.parametrize("inputs", [[], [None], [draw(2, 3)] * 20])
@pytest.mark.parametrize("attrs", [{}, {"alpha": "x", "epsilon": [1], "num_heads": 0.5,
                                        "kernel_shape": 3, "activation": 1, "strides": "a"}])  # fmt: skip
def test_rule_of_a_misfit_node_refuses_it_or_gives_valid_types(
    op: str, inputs: Any, attrs: Mapping[str, Any]
) -> None:
    try:
        ps.compile(contrib_model(op, inputs, attrs))
    except ps.PenstockError as error:
        assert not isinstance(error, ps.InternalError)
