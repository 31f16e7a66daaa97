"""Every operation with compiled kernels, on random nodes with awkward shapes and numbers: NumPy's
results bit by bit, or within bounds of rounding errors that are derived from what is computed."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from penstock.backends.native import family_of
from penstock.backends.native.kernel import ROUNDED, UnsupportedError, site_of
from tests.support.differential import EXEMPT, compared, difference, drawn, operations
from tests.support.error_bounds import Rounded, gamma
from tests.support.kernel_draws import DRAWS
from tests.support.native_kernels import LIBRARIES, expected, pytestmark  # noqa: F401

SEEDS = range(3)


def test_every_operation_with_compiled_kernels_has_a_draw() -> None:
    assert set(operations()) - set(EXEMPT) == set(DRAWS)


@pytest.mark.parametrize("operation", DRAWS)
def test_operation_is_within_its_bound_of_numpy(operation: str) -> None:
    seen = Counter[str]()
    assert [difference(operation, seed, seen) for seed in SEEDS] == [None] * len(SEEDS)
    assert seen[operation]


@pytest.mark.full
@pytest.mark.parametrize("operation", DRAWS)
def test_operation_of_more_draws_is_within_its_bound_of_numpy(operation: str) -> None:
    for seed in range(len(SEEDS), 40):
        assert difference(operation, seed) is None, seed


@pytest.mark.full
def test_every_kernel_is_drawn() -> None:
    """Those that round to bfloat16 need ``precision="bf16"``: ``test_bfloat16.py``. Attention over a
    cache and draws are called by functions, and normalization of channels that are innermost when
    it is bound."""
    library = LIBRARIES[-1]
    lacking = {name for name in library.kernels if not name.startswith(ROUNDED)}
    lacking -= {f"group_normalization_{dtype}_last" for dtype in ("float32", "float64")}
    lacking -= {"attention_cache", "paged_attention", "multinomial"}
    for seed in range(300):
        for operation in DRAWS if lacking else ():
            node = drawn(operation, seed).node
            family = family_of(node)
            assert family is not None
            types = [None if value is None else value.type for value in node.inputs]
            site = site_of(library, node, types, data_dependent=family.data_dependent)
            with suppress(UnsupportedError):
                call = site and family.static and family.static(site)
                lacking -= {call.kernel} if call else set()
    assert lacking == set()


@pytest.mark.parametrize("operation", ["Conv", "Exp", "GRU", "Softmax", "ReduceSum", "Add"])
def test_result_beyond_its_bound_is_told(operation: str) -> None:
    draws = (drawn(operation, seed) for seed in range(99))
    draw, wanted = next(
        (draw, wanted)
        for draw, wanted in ((draw, expected(draw.node, draw.inputs)) for draw in draws)
        if wanted[0].dtype.kind == "f" and wanted[0].size and np.isfinite(wanted[0]).all()
    )
    with np.errstate(all="ignore"):
        check = compared(draw, 0, wanted)
    result = wanted[0]
    assert check(result) is None
    assert check(result + (np.abs(result) / 64 + 1 / 4).astype(result.dtype)) is not None
    assert check(result[None]) is not None
    assert check(result.astype(np.complex64)) is not None


def test_bound_holds_for_sums_and_quotients_in_float32_and_is_no_wider_than_needed() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(40, 200)).astype(np.float32) for _ in range(2))
    a, b = (Rounded.exact(v, x.dtype) for v in (x, y))
    for bound, result in (
        ((a * b).sum(1), (x * y).sum(1)),
        (a @ b.map(np.transpose), x @ y.T),
        ((a * a + 1.0).sqrt() / (b * b + 0.5), np.sqrt(x * x + 1) / (y * y + np.float32(0.5))),
    ):
        assert (np.abs(result - bound.value) <= bound.error).all()
        assert bound.error.max() <= 1.1 * gamma(205, 2.0**-24) * 200 * 20
