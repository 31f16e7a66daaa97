"""Searches for tokens by compiled functions: against NumPy's, beside the draws of all kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.core.types import ShapeError
from tests.support.differential import drawn
from tests.support.native_kernels import LIBRARIES, expected, kernel_of, pytestmark  # noqa: F401

PARTS = ["SearchStart", "SearchStep", "SearchEnd"]
LOGITS, SEQUENCES, SEED, PROCESSOR = 0, 4, -2, -1


def computed(node: Any, inputs: Any) -> tuple[Any, int]:
    """What the compiled function returns, and how often it called NumPy's."""
    function, calls = kernel_of(node, LIBRARIES[-1]).function, []

    def otherwise(*arrays: Any) -> Any:
        calls.append(arrays)
        return function.args[0](*arrays)

    return partial(function.func, otherwise, *function.args[1:])(*inputs), len(calls)


@pytest.mark.parametrize("part", PARTS)
def test_search_is_computed_without_numpy(part: str) -> None:
    for seed in range(20):
        draw = drawn(f"penstock.{part}", seed)
        assert computed(draw.node, draw.inputs)[1] == 0


@np.errstate(all="ignore")
@pytest.mark.parametrize("kind", ["nan", "float16", "timestamps", "strange tokens"])
def test_step_that_has_no_compiled_code_is_numpys(kind: str) -> None:
    names = ["beginning_timestamp", "no_timestamps", "start_of_lm", "decoder_start"]
    names += ["translate", "transcribe"]
    count = 0
    for seed in range(20):
        draw = drawn("penstock.SearchStep", seed)
        if not draw.attrs["beam_search"]:
            continue
        inputs = [x if x is None else x.copy() for x in draw.inputs]
        draw.attrs.update({f"{name}_token_id": 0 for name in names})
        if kind == "nan":
            inputs[LOGITS][...] = np.nan
        elif kind == "float16":
            inputs[LOGITS] = inputs[LOGITS].astype(np.float16)
        elif kind == "timestamps":
            inputs[PROCESSOR] = np.array([1], np.int32)
        else:
            inputs[SEQUENCES][...] = 1 << 20
            draw.attrs["no_repeat_ngram_size"] = 1
        node = draw._node(inputs)
        try:
            want: Any = expected(node, inputs)
        except IndexError:
            with pytest.raises(IndexError):
                computed(node, inputs)
            continue
        got, calls = computed(node, inputs)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        # Samples that have ended look at no scores.
        count += calls
    assert count or kind == "strange tokens"


@np.errstate(all="ignore")
@pytest.mark.parametrize("part", ["SearchEnd", "SearchStep"])
def test_scores_that_are_nan_and_large_seeds_give_what_numpy_gives(part: str) -> None:
    rng = np.random.default_rng(1)
    for seed in range(40):
        draw = drawn(f"penstock.{part}", seed)
        inputs = [x if x is None else x.copy() for x in draw.inputs]
        scores = inputs[3 if part == "SearchEnd" else LOGITS]
        scores[rng.random(scores.shape) < 0.3] = np.nan
        if part == "SearchStep":
            inputs[SEED] = np.array([(1 << 62) + seed])
        node = draw._node(inputs)
        results = computed(node, inputs)[0]
        results = results if isinstance(results, tuple) else (results,)
        for a, b in zip(results, expected(node, inputs), strict=True):
            np.testing.assert_array_equal(a, b)


@np.errstate(all="ignore")
def test_token_drawn_by_scores_that_are_nan_is_one_of_the_vocabulary() -> None:
    draws = [drawn("penstock.SearchStep", seed) for seed in range(40)]
    for draw in [draw for draw in draws if draw.attrs["kind"] == "Sampling"]:
        inputs = [np.full_like(draw.inputs[LOGITS], np.nan), *draw.inputs[1:]]
        results, calls = computed(draw.node, inputs)
        assert calls == 0
        for ids in (results[3], expected(draw.node, inputs)[3]):
            assert set(ids.flat) <= {0, inputs[LOGITS].shape[-1] - 1}


@pytest.mark.parametrize("part", PARTS)
def test_search_of_misfit_arrays_is_an_error_or_numpys(part: str) -> None:
    draw = drawn(f"penstock.{part}", 3)
    for i, x in enumerate(draw.inputs):
        if x is None or not x.size:
            continue
        for other in (x[:0], x[None], x[..., :-1], x.astype(np.float64)):
            inputs = [*draw.inputs[:i], other, *draw.inputs[i + 1 :]]
            with np.errstate(all="ignore"):
                try:
                    expected(draw.node, inputs)
                except (ShapeError, ValueError, TypeError, IndexError) as error:
                    with pytest.raises(type(error)):
                        computed(draw.node, inputs)
                else:
                    computed(draw.node, inputs)
