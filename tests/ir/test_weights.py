"""What a session keeps of weights that passes have converted."""

from __future__ import annotations

from penstock.ir.weights import ConvertedWeights


def test_converted_weights_are_of_one_session() -> None:
    one, other = ConvertedWeights(), ConvertedWeights()
    assert one.widened is not other.widened
    assert one.halves is not other.halves
