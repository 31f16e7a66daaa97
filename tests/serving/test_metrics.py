"""Statistics of requests, as Prometheus reads them."""

from __future__ import annotations

import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.support.timing import SOON
from tests.support.triton import InferenceServerException, fed, serving


def test_statistics_and_metrics_count_requests(affine):
    x = fed("x", np.ones((1, 3), np.float32), "FP32", binary=True)
    bad = fed("x", np.ones((1, 4), np.float32), "FP32", binary=True)
    with serving({"affine": affine}) as (triton, url, _):
        for _ in range(3):
            triton.infer("affine", [x])
        with pytest.raises(InferenceServerException):
            triton.infer("affine", [bad])
        (stats,) = triton.get_inference_statistics("affine")["model_stats"]
        assert stats["inference_count"] == 3
        assert stats["inference_stats"]["success"]["count"] == 3
        assert stats["inference_stats"]["fail"]["count"] == 1
        assert triton.get_inference_statistics()["model_stats"] == [stats]
        with urllib.request.urlopen(f"{url}/metrics", timeout=SOON) as response:
            text = response.read().decode()
        labels = 'model="affine",outcome="success",version="1"'
        assert f"penstock_request_seconds_count{{{labels}}} 3.0" in text
        assert 'penstock_batches_total{model="affine",version="1"} 4.0' in text
        assert f'penstock_request_seconds_bucket{{le="0.0001",{labels}}}' in text
        of = 'model="affine",version="1"'
        for name in ("queue_seconds", "compute_seconds", "batch_rows"):
            assert f"penstock_{name}_count{{{of}}} 4.0" in text
        assert f'penstock_batch_rows_bucket{{le="1.0",{of}}} 4.0' in text
        for name in ("queue", "compute_infer"):
            assert stats["inference_stats"][name]["count"] == 4
