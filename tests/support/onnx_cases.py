"""The cases of single operations of the official ONNX suite.

The package ``onnx`` computes what it wants of them when its modules are imported, for five seconds of
each process that collects tests. They are kept in ``.cache``, for each of its versions.
"""

from __future__ import annotations

import os
import pickle
import warnings
from functools import cache
from pathlib import Path

import onnx
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_node_model_tests

KEPT = Path(__file__).parents[2] / ".cache" / f"onnx-cases-{onnx.__version__}.pickle"


@cache
def node_cases() -> list[TestCase]:
    """All cases of single operations, with their models and what they are fed and wanted to give."""
    try:
        return pickle.loads(KEPT.read_bytes())
    except FileNotFoundError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of infinities
        cases = load_node_model_tests()
    KEPT.parent.mkdir(exist_ok=True)
    written = KEPT.with_suffix(f".{os.getpid()}")
    written.write_bytes(pickle.dumps(cases))
    written.replace(KEPT)
    return cases
