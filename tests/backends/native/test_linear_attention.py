"""LinearAttention against NumPy's kernel, where its tests have few keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native import family_of
from penstock.backends.native.kernel import native_kernel, site_of
from penstock.core.types import FLOAT32
from tests.support.native_kernels import LIBRARIES, node_of, pytestmark  # noqa: F401

rng = np.random.default_rng(6)


def case(size, values, length, outputs, dtype=FLOAT32):
    """A node of two heads, each read by two of queries, and what it is fed."""
    normal = lambda *dims: rng.normal(size=dims).astype(dtype)  # noqa: E731
    inputs = [normal(1, length, 4 * size), normal(1, length, 2 * size) / np.float32(size)]
    inputs += [normal(1, length, 2 * values), normal(1, 2, size, values)]
    inputs += [-abs(normal(1, length, 2)), abs(normal(1, length, 1))]
    attrs = {"q_num_heads": 4, "kv_num_heads": 2}
    return node_of("LinearAttention", inputs, [], outputs, "", 27, **attrs), inputs


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("sizes", [(512, 200, 2), (40, 64, 33), (7, 48, 0)])
def test_linear_attention_of_every_level_equals_numpy(sizes, outputs):
    node, inputs = case(*sizes, outputs)
    types = [value.type for value in node.inputs]
    wanted = node.op.compile(node, types).function(*inputs)
    for library in LIBRARIES:
        site = site_of(library, node, types)
        results = native_kernel(site, family_of(node).static(site)).function(*inputs)
        pairs = [(results, wanted)] if outputs == 1 else zip(results, wanted, strict=True)
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_linear_attention_of_many_keys_or_other_types_is_left_to_numpy():
    for node, _ in (case(513, 2, 1, 2), case(4, 4, 1, 2, np.dtype(np.float16))):
        site = site_of(LIBRARIES[-1], node, [value.type for value in node.inputs])
        assert family_of(node).static(site) is None
