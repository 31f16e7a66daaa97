"""Which outputs are fed back, and where batch axes are."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.core.types import TensorType
from penstock.session.facts import Port
from penstock.stepping.state_pairs import batch_axes, check_state, match_state

DIMS = (2, "batch", 64)


def port(
    name: str, dims: tuple[int | str | None, ...] | None = DIMS, dtype: str = "float32"
) -> Port:
    return Port(name, TensorType(np.dtype(dtype), dims))


FRAME, OUTPUT = port("input", ("batch", 512)), port("output", ("batch", 1))


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("h", "hn"),
        ("h0", "hn"),
        ("h_0", "h_n"),
        ("h_in", "h_out"),
        ("state", "stateN"),
        ("state", "new_state"),
        ("stateIn", "stateOut"),
        ("x_in", "x_out"),
        ("cached_k_0", "new_cached_k_0"),
        ("in_cache0", "out_cache0"),
        ("cache_in_0", "cache_out_0"),
        ("input_states_1", "output_states_1"),
        ("cache_last_channel", "cache_last_channel_next"),
        ("prev_state", "state"),
        ("feature_cache", "feature_cache_out"),
    ],
)
def test_states_are_matched_by_names(name: str, output: str) -> None:
    assert match_state([FRAME, port(name)], [OUTPUT, port(output)]) == {name: output}


def test_several_states_are_matched_each_by_its_number() -> None:
    inputs = [FRAME, *[port(f"h{i}") for i in range(3)], *[port(f"c{i}") for i in range(3)]]
    outputs = [
        OUTPUT,
        *[port(f"c{i}_out") for i in range(3)],
        *[port(f"h{i}_out") for i in range(3)],
    ]
    assert match_state(inputs, outputs) == {
        f"{c}{i}": f"{c}{i}_out" for c in "hc" for i in range(3)
    }


@pytest.mark.parametrize(
    "output",
    [
        port("hn", (2, "batch", 32)),
        port("hn", ("batch", 64)),
        port("hn", dtype="int64"),
        port("y"),
        port("token"),
    ],
)
def test_output_of_other_dims_dtype_or_name_is_not_matched(output: Port) -> None:
    assert match_state([FRAME, port("h")], [OUTPUT, output]) == {}


def test_output_of_unknown_rank_is_matched_by_its_name() -> None:
    assert match_state([port("h")], [port("hn", None)]) == {"h": "hn"}


def test_inputs_and_outputs_without_names_of_states_are_not_matched() -> None:
    assert match_state([port("input_1"), port("input")], [port("output_1"), port("output")]) == {}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["h"], ["h_out", "new_h"]),
        (["h_in", "h_prev"], ["h_out"]),
        (["audio_in", "h_in"], ["audio_out", "h_out"]),
        (["audio_in"], ["audio_out"]),
        (["x_in", "h_in"], ["x_out", "h_out"]),
    ],
)
def test_ambiguous_names_are_refused(inputs: list[str], outputs: list[str]) -> None:
    with pytest.raises(ps.InvalidInput, match=r"state=\{'"):
        match_state([port(name) for name in inputs], [port(name) for name in outputs])


def test_named_states_are_checked() -> None:
    inputs, outputs = [FRAME, port("h"), port("c")], [OUTPUT, port("a"), port("b", (2, 3, 32))]
    assert check_state({"h": "a"}, inputs, outputs) == {"h": "a"}
    with pytest.raises(ps.InvalidInput, match="has inputs"):
        check_state({"z": "a"}, inputs, outputs)
    with pytest.raises(ps.InvalidInput, match="cannot be fed back"):
        check_state({"h": "b"}, inputs, outputs)
    with pytest.raises(ps.InvalidInput, match="several"):
        check_state({"h": "a", "c": "a"}, inputs, outputs)


def test_batch_axis_is_that_of_the_shared_name() -> None:
    inputs = [port("x", ("time", "N", 80)), port("h", (2, "N", "units")), port("rate", ())]
    assert batch_axes(inputs, {"h": "hn"}) == {"x": 1, "h": 1}
    likely = [port("h", ("units", "batch")), port("c", ("units", "batch"))]
    assert batch_axes(likely, {"h": "hn", "c": "cn"}) == {"h": 1, "c": 1}


def test_input_without_the_shared_name_is_shared_by_all() -> None:
    assert batch_axes([port("x", (1, "t")), port("h")], {"h": "hn"}) == {"h": 1}


def test_batch_axis_of_unnamed_dims_is_the_only_open_one_or_the_first() -> None:
    inputs = [port("x", (None, None)), port("h", (2, None, 64))]
    assert batch_axes(inputs, {"h": "hn"}) == {"x": 0, "h": 1}
    named = [port("x", ("x_0", 4)), port("h", (2, "h_1", 64)), port("c", (2, "c_1", 64))]
    assert batch_axes(named, {"h": "hn", "c": "cn"}) == {"x": 0, "h": 1, "c": 1}


def test_state_of_one_sample_has_no_batch_axis() -> None:
    with pytest.raises(RowsStay, match="has no open dim"):
        batch_axes([port("x", ("b", 4)), port("h", (2, 1, 64))], {"h": "hn"})
    with pytest.raises(RowsStay, match="no input"):
        batch_axes([port("x", (1, 4))], {})
