"""State that a model feeds back to itself, and its initial values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.ir.graph import Model
from penstock.passes.structure.carry_variables import assigns_variables, carry_variables
from penstock.session.facts import Port
from penstock.stepping.state_pairs import check_state, match_state


class FedState(NamedTuple):
    """A ``model`` and its outputs that are fed back, by input: those ``given`` by the user (None to
    match them by name), and the outputs of ``variables``, with their ``initial`` values. ``grows``:
    states are in a loop, where they may change their shapes and runs have no batch."""

    model: Model
    given: Mapping[str, str] | None
    variables: Mapping[str, str] = {}
    initial: Mapping[str, np.ndarray] = {}
    grows: bool = False

    @classmethod
    def of(cls, model: Model, given: Mapping[str, str] | None) -> FedState:
        """Return the fed-back state of a model, whose variables become states."""
        if not assigns_variables(model.graph):
            return cls(model, given)
        carried = carry_variables(model)
        # A model with variables has its state in these: do not match other ports by name.
        return cls(carried.model, given or {}, carried.state, carried.initial)

    def pairs(self, inputs: Sequence[Port], outputs: Sequence[Port]) -> dict[str, str]:
        """Return the outputs that are fed back, by inputs. Raises ``InvalidInput``."""
        left = [port for port in inputs if port.name not in self.variables]
        if self.given is None:
            return match_state(left, outputs)
        return {**check_state(self.given, left, outputs), **self.variables}
