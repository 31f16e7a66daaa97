"""What is run before the first request, so that no request waits for a plan."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.serving.test_replicas import Held
from tests.support.onnx_text import model_from_text

OPEN = "g (float[N, M] x, int64[N, M] i) => (float[N, M] y) { z = Sin(x) y = Cast<to = 1>(z) }"


def feeds(rows: int, width: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, width), np.float32), "i": np.ones((rows, width), np.int64)}


@pytest.fixture
def backend() -> Held:
    backend = Held()
    backend.opened.set()
    return backend


@pytest.mark.parametrize(
    ("shapes", "max_batch", "ran"),
    [
        ({"N": 1, "M": 4}, 1, [(1, 4)]),
        ([{"x": [2, 3], "i": [2, 3]}, {"N": 1, "M": 5}], 1, [(2, 3), (1, 5)]),
        ({"N": 1, "M": 4}, 4, [(1, 4), (2, 4), (3, 4), (4, 4)]),
        ({"N": 3, "M": 2}, 7, [(3, 2), (6, 2)]),
        ({"N": 9, "M": 2}, 7, [(9, 2)]),
    ],
)
def test_shapes_and_their_batches_are_run_before_the_first_request(backend, shapes, max_batch, ran):
    options = {"shapes": shapes, "max_batch": max_batch, "backends": [backend]}
    with ps.Replicas(model_from_text(OPEN), 1, warm_up=True, **options) as replicas:
        assert backend.shapes[-len(ran) :] == ran
        made = replicas.session.stats.plans_made
        for rows, width in ran:
            replicas.run(feeds(rows, width))
        assert replicas.session.stats.plans_made == made


def test_batches_are_tried_with_the_shapes_that_are_compiled(backend):
    with ps.Replicas(
        model_from_text(OPEN), 1, max_batch=4, shapes={"N": 1, "M": 4}, backends=[backend]
    ):
        assert backend.shapes == [(1, 4)] * 3 + [(3, 4)]
    with pytest.raises(ValueError, match="fix them with shapes="):
        ps.Replicas(model_from_text(OPEN), 1, max_batch=4)


def test_model_with_open_dims_is_not_warmed_up_without_shapes():
    with pytest.raises(ps.InvalidInput, match="shapes= must say every dim"):
        ps.Replicas(model_from_text(OPEN), 1, warm_up=True)


def test_model_that_does_not_run_on_made_up_values_says_so(backend, monkeypatch):
    monkeypatch.setattr(backend, "sine", lambda x: 1 / 0)
    with pytest.raises(ValueError, match="cannot be warmed up"):
        ps.Replicas(
            model_from_text(OPEN), 1, warm_up=True, shapes={"N": 1, "M": 1}, backends=[backend]
        )
