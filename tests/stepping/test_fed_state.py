"""What is fed back of models with and without variables."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.stepping.fed_state import FedState
from tests.support.streams import stream_model
from tests.support.variable_models import summing


def test_names_tell_the_states_of_a_model_without_variables() -> None:
    session = ps.compile(model := ps.load(stream_model("lstm")))
    fed = FedState.of(model, None)
    assert fed.model is model
    assert fed.pairs(session.inputs, session.outputs) == {"h0": "hn", "c0": "cn"}


def test_variables_are_states_that_begin_with_their_values() -> None:
    fed = FedState.of(ps.load(summing()), None)
    session = ps.compile(fed.model)
    assert fed.pairs(session.inputs, session.outputs) == {"sum": "sum/next"}
    np.testing.assert_array_equal(fed.initial["sum"], np.full((1, 3), 10))


def test_states_that_are_named_stand_beside_variables() -> None:
    fed = FedState.of(ps.load(summing()), {"x": "y"})
    session = ps.compile(fed.model)
    assert fed.pairs(session.inputs, session.outputs) == {"x": "y", "sum": "sum/next"}
    with pytest.raises(ps.InvalidInput, match="the model has inputs"):
        fed._replace(given={"sum": "y"}).pairs(session.inputs, session.outputs)
