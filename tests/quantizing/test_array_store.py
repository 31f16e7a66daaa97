"""Arrays in a temporary file."""

import ml_dtypes
import numpy as np

from penstock.quantizing.array_store import ArrayStore


def test_store_returns_what_was_written():
    items = [
        {"a": np.arange(6, dtype=np.int16).reshape(2, 3).T, "b": np.float64(3)},
        {"a": np.zeros((0, 2), np.int16), "s": np.array(["x", "yz"], object), "l": [np.ones(2)]},
        {"h": np.ones(3, ml_dtypes.bfloat16), "t": np.array(["x", "yz"]), "n": np.array(5)},
    ]
    store = ArrayStore(iter(items))
    assert len(store) == 3
    for item, own in zip(items, store, strict=True):
        assert item.keys() == own.keys()
        for name, value in item.items():
            np.testing.assert_array_equal(own[name], value)
            assert np.asarray(own[name]).dtype == np.asarray(value).dtype
    assert [*store.subset([2, 0])[0]] == ["h", "t", "n"]
    assert len(store[1:]) == 2
    store.append({"a": np.ones(2)})
    np.testing.assert_array_equal(store[-1]["a"], [1, 1])
