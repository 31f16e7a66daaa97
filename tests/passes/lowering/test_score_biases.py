"""What biases do, told by their values at probes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.ir.graph import Value
from penstock.passes.lowering.row_rules import Stays
from penstock.passes.lowering.score_biases import ScoreBiases, Seen
from penstock.passes.lowering.step_probes import Probe

LOW = np.float32(-3.4e38)
BIAS = Value("bias")


def biases_of(
    bias: Callable[[Probe], np.ndarray], masked: bool = True, far: int = 500
) -> ScoreBiases:
    """Of a value that is ``bias`` at each probe; positions of an encoder are 10, 20 and 50."""
    probes = []
    for rows, past, source in ((7, 11, 10), (13, 5, 20), (3, far - 3, 50)):
        present = np.arange(source) % 4 != 1 if masked else None
        probe = Probe(rows, past, {}, present)
        probes.append(probe._replace(values={"bias": bias(probe)}))
    made: Any = SimpleNamespace(near=probes[:2], far=probes[2:])
    return ScoreBiases(made)


def causal(probe: Probe) -> np.ndarray:
    behind = np.arange(probe.past + probe.rows) > probe.positions[:, None]
    return np.where(behind, LOW, np.float32(0))[None, None]


def absent(probe: Probe, low: float = float(LOW)) -> np.ndarray:
    assert probe.present is not None
    return np.where(probe.present, 0, low).astype(np.float32)[None, None, None]


def test_mask_of_all_behind_a_row_is_no_window() -> None:
    assert biases_of(causal).seen_before([BIAS], False) == Seen(0, None)


def test_numbers_beside_a_mask_are_told_apart() -> None:
    seen = biases_of(
        lambda probe: causal(probe) + np.arange(probe.past + probe.rows, dtype=np.float32)
    ).seen_before([BIAS], False)
    assert seen.window == 0
    np.testing.assert_array_equal(seen.by_distance, [[0, -1]])


@pytest.mark.parametrize("slope", [-0.5, -0.001, 0.5])
def test_numbers_that_are_large_far_away_hide_nothing(slope: float) -> None:
    def bias(probe: Probe) -> np.ndarray:
        keys = np.arange(probe.past + probe.rows)
        distance = (probe.positions[:, None] - keys).astype(np.float32)
        slopes = np.array([slope, slope / 16], np.float32)[:, None, None]
        return np.where(distance < 0, LOW, slopes * distance)[None]

    seen = biases_of(bias, far=100_000).seen_before([BIAS], False)
    assert seen.window == 0
    np.testing.assert_allclose(seen.by_distance, [[0, slope], [0, slope / 16]], rtol=1e-6)


def test_equal_values_of_layers_are_told_once() -> None:
    biases, other = biases_of(causal), Value("other")
    for probe in (*biases._probes.near, *biases._probes.far):
        probe.values["other"] = causal(probe).copy()  # type: ignore[index]
    assert biases.seen_before([BIAS], False) is biases.seen_before([other], False)


def test_nothing_hides_rows_behind_without_a_mask() -> None:
    assert biases_of(causal).seen_before([], True) == Seen()
    with pytest.raises(Stays, match="attend to later rows"):
        biases_of(causal).seen_before([], False)


@pytest.mark.parametrize("low", [-1e30 * 4, -3.4e38, -np.inf])
def test_mask_hides_what_is_absent(low: float) -> None:
    assert biases_of(lambda probe: absent(probe, low)).hides_absent([BIAS])


@pytest.mark.parametrize("number", [0.0, 2.5])
def test_the_same_number_for_all_hides_nothing(number: float) -> None:
    def bias(probe: Probe) -> np.ndarray:
        return np.full((1, 1, probe.rows, 1), number, np.float32)

    assert not biases_of(bias).hides_absent([BIAS])
    assert not biases_of(bias, masked=False).hides_absent([BIAS])
    assert not biases_of(bias).hides_absent([])


@pytest.mark.parametrize(
    "bias, why",
    [
        (lambda p: absent(p, -100), "to cross attention scores"),
        (lambda p: absent(p._replace(present=~p.present)), "other than those where its mask"),
        (lambda p: absent(p)[..., :-1], "has a cross attention bias"),
        (lambda p: absent(p) * (p.present.size == 50), "only for some of the masks"),
        (lambda p: absent(p) * (np.arange(p.rows) > 0)[:, None], "other than those where its mask"),
        (lambda p: np.full((1, 1, 1, 1), LOW), "other than those where its mask"),
    ],
)
def test_biases_that_are_no_masks_are_refused(
    bias: Callable[[Probe], np.ndarray], why: str
) -> None:
    with pytest.raises(Stays, match=why):
        biases_of(bias).hides_absent([BIAS])
