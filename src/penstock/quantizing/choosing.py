"""The choice of a type for each layer: a minimal sum over measured times and errors.

The time of a plan is the sum of the times of its layers, and of the nodes between two layers, which
depend on the types of both: elementwise operations between codes move fewer bytes, and values that
no layer of codes produces must be converted. Errors of layers are small, and their squares nearly
add up. So the least of ``time + weight * error`` is a minimal sum (``algorithms.min_sum``); the
larger the weight, the smaller the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.algorithms.min_sum import Pair, eliminate
from penstock.core.records import NamedTuple, dataclass
from penstock.quantizing.layers import Choice, LayerType, QuantizableLayer, same_storage

_ENTRIES = 2**14  # of the largest table
_SWEEPS = 8
_HALVINGS = 40


class LayerCost(NamedTuple):
    """Cost of a layer as one type: the seconds of a run, the squared error of the model's outputs,
    and the bytes of its weights."""

    seconds: float
    error: float
    nbytes: float


class Between(NamedTuple):
    """Cost between two layers, given by their indices: seconds with codes on both sides, seconds
    otherwise, and seconds of the conversion to or from codes if only one side has codes, including
    the change of memory layout."""

    first: int
    second: int
    coded: float
    real: float
    conversion: float

    def seconds(self, first: LayerType, second: LayerType) -> float:
        if first == second == "static":
            return self.coded
        return self.real + (self.conversion if "static" in (first, second) else 0.0)


class SharedWeights(NamedTuple):
    """Two layers, by their places, that share weights: the second stores none if they are the same
    bytes, else those by its type that ``nbytes`` says."""

    first: int
    second: int
    nbytes: Mapping[LayerType, float]

    def of(self, first: LayerType, second: LayerType) -> float:
        return 0.0 if same_storage(first, second) else self.nbytes[second]


@dataclass(frozen=True, eq=False)
class Costs:
    """The inputs of a choice: the costs of each layer by type, between layers, and shared costs."""

    layers: Sequence[QuantizableLayer]
    table: Sequence[Mapping[LayerType, LayerCost]]
    between: Sequence[Between]
    shared: Sequence[SharedWeights] = ()

    def choose(self, error: float, size: float = 0.0, time: float = 1.0) -> Choice:
        """The types with the least sum of seconds times ``time``, errors times ``error`` and bytes
        times ``size``."""
        types = [list(own) for own in self.table]
        own = [
            [c.seconds * time + c.error * error + c.nbytes * size for c in costs.values()]
            for costs in self.table
        ]
        pairs = [
            Pair(
                b.first,
                b.second,
                [b.seconds(s, t) * time for s in types[b.first] for t in types[b.second]],
            )
            for b in self.between
        ]
        pairs += [
            Pair(
                own.first,
                own.second,
                [own.of(s, t) * size for s in types[own.first] for t in types[own.second]],
            )
            for own in self.shared
        ]
        # Exact for chains and residual networks; tables of densely joined graphs are too large.
        states = eliminate(own, pairs, _ENTRIES)
        if states is None:
            states = _descended(own, pairs, [len(each) for each in types])
        return {
            layer.name: names[state]
            for layer, names, state in zip(self.layers, types, states, strict=True)
        }

    def total(self, choice: Choice) -> LayerCost:
        """The sums for a choice."""
        chosen = [choice.get(layer.name, "float32") for layer in self.layers]
        costs = [own[type_] for own, type_ in zip(self.table, chosen, strict=True)]
        seconds = math.fsum(c.seconds for c in costs)
        seconds += math.fsum(b.seconds(chosen[b.first], chosen[b.second]) for b in self.between)
        error = math.fsum(c.error for c in costs)
        nbytes = math.fsum(c.nbytes for c in costs)
        nbytes += math.fsum(own.of(chosen[own.first], chosen[own.second]) for own in self.shared)
        return LayerCost(seconds, error, nbytes)

    def conversions(self, choice: Choice) -> float:
        """The seconds of conversions in a choice."""
        chosen = [choice.get(layer.name, "float32") for layer in self.layers]
        pairs = [(b, chosen[b.first], chosen[b.second]) for b in self.between]
        return math.fsum(b.conversion for b, s, t in pairs if (s == "static") != (t == "static"))

    def fastest_within(self, error: float, size: float = 0.0) -> Choice:
        """The fastest choice with a total error of at most ``error`` that a weighted sum can find,
        by bisection of the weight. If no error is allowed, all layers are float32."""
        low, high = 1e-9, 1e9  # seconds for an error of one spread
        best: Choice = {layer.name: "float32" for layer in self.layers}
        if self.total(self.choose(0.0, size)).error <= error:
            return self.choose(0.0, size)
        # In logarithms: the weight of errors in seconds may have any magnitude.
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            choice = self.choose(middle, size)
            if self.total(choice).error <= error:
                best, high = choice, middle
            else:
                low = middle
        return best


def _descended(
    own: Sequence[Sequence[float]], pairs: Sequence[Pair], sizes: Sequence[int]
) -> list[int]:
    """States of a low sum for graphs too wide to eliminate: coordinate descent from the best state
    of each variable alone."""
    # The best type for each layer alone is a better start than float32 for all.
    states = [list(table).index(min(table)) for table in own]
    around: list[list[Pair]] = [[] for _ in own]
    for pair in pairs:
        around[pair.first].append(pair)
        around[pair.second].append(pair)
    for _ in range(_SWEEPS):
        before = list(states)
        for v, table in enumerate(own):

            def total(s: int, v: int = v, table: Sequence[float] = table) -> float:
                sums = table[s]
                for a, b, costs in around[v]:
                    i, j = (s, states[b]) if a == v else (states[a], s)
                    sums += costs[i * sizes[b] + j]
                return sums

            states[v] = min(range(sizes[v]), key=total)
        if states == before:
            break
    return states
