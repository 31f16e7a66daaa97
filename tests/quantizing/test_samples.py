"""Where samples come from."""

import tracemalloc

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.samples import held_out_apart, samples_of

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def listed(samples):
    return [{name: array.tolist() for name, array in sample.items()} for sample in samples]


def test_stacked_file_has_samples_along_the_axis_in_front(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=X[:, 0])
    samples = samples_of(tmp_path / "a.npz", ["x", "y"])
    assert len(samples) == 6
    assert listed(samples)[1] == {"x": [2.0, 3.0], "y": 2.0}
    np.save(tmp_path / "b.npy", X)
    assert listed(samples_of(str(tmp_path / "b.npy"), ["x"]))[5] == {"x": [10.0, 11.0]}


def test_folder_has_a_sample_in_each_file(tmp_path):
    for i in range(3):
        np.savez(tmp_path / f"{i}.npz", x=X[i], other=1)
    assert listed(samples_of(tmp_path, ["x"])) == [{"x": X[i].tolist()} for i in range(3)]


def test_samples_are_read_when_they_are_needed(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", X[i])
    samples = samples_of(tmp_path, ["x"])
    (tmp_path / "2.npy").unlink()
    assert listed(samples.subset([0, 1])) == [{"x": [0.0, 1.0]}, {"x": [2.0, 3.0]}]


@pytest.mark.parametrize("data", [[*X], [{"x": x} for x in X], lambda: iter(X)])
def test_iterables_and_functions(data):
    assert listed(samples_of(data, ["x"]))[2] == {"x": [4.0, 5.0]}


def test_iterators_and_stacked_files_are_not_held_in_memory(tmp_path):
    def drawn():
        return ({"x": np.full((1 << 20,), i, np.float32)} for i in range(8))

    np.savez_compressed(tmp_path / "a.npz", x=np.stack([own["x"] for own in drawn()]))
    for data in (drawn, drawn(), tmp_path / "a.npz"):
        tracemalloc.start()
        try:
            samples = samples_of(data, ["x"])
            firsts = [sample["x"][0] for sample in samples]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert firsts == [*range(8)] and samples.read(5)["x"][-1] == 5
        assert peak < 4 * 2**22  # of 8 * 2 ** 22


def test_stacked_files_of_any_dtype_and_order(tmp_path):
    texts = np.array(["a", "bc", "d"])
    turned = np.asfortranarray(X[:3])
    np.savez(tmp_path / "a.npz", x=turned, s=texts, b=np.zeros((3, 0), bool))
    samples = samples_of(tmp_path / "a.npz", ["x", "s", "b"])
    assert listed(samples)[1] == {"x": [2.0, 3.0], "s": "bc", "b": []}


def test_every_fourth_is_held_out():
    assert held_out_apart(9) == ([0, 1, 2, 4, 5, 6, 8], [3, 7])
    assert held_out_apart(2) == ([0], [1])
    assert held_out_apart(1) == ([0], [0])


def test_faults_are_named(tmp_path):
    with pytest.raises(ps.InvalidInput, match="sample 1 lacks 'y'"):
        samples_of([{"x": 1, "y": 2}, {"x": 1}], ["x", "y"])
    with pytest.raises(ps.InvalidInput, match="no mapping"):
        samples_of([X], ["x", "y"])
    with pytest.raises(ps.InvalidInput, match="sample 1: input 'x' is no array"):
        samples_of([{"x": [[1, 2]]}, {"x": [[1, 2], [3]]}], ["x"])
    with pytest.raises(ps.InvalidInput, match="no samples"):
        samples_of(tmp_path, ["x"])
    with pytest.raises(TypeError, match="data"):
        samples_of(3, ["x"])
    (tmp_path / "a.npz").write_bytes(b"no")
    with pytest.raises(ps.InvalidInput, match="cannot be read"):
        samples_of(tmp_path / "a.npz", ["x"])
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(ps.InvalidInput, match="objects"):
        samples_of(tmp_path / "a.npz", ["x"])
    np.save(tmp_path / "a.npy", X)
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data[:-1])
    with pytest.raises(ps.InvalidInput, match="ends before"):
        samples_of(tmp_path / "a.npy", ["x"])
    np.savez(tmp_path / "b.npz", x=X, y=X[:3])
    with pytest.raises(ps.InvalidInput, match="axis in front"):
        samples_of(tmp_path / "b.npz", ["x", "y"])
    with pytest.raises(ps.InvalidInput, match="folder"):
        samples_of(tmp_path / "b.txt", ["x"])
