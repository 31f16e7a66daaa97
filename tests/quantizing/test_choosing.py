"""The choice by minimal sums, beside all choices."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.quantizing import choosing
from penstock.quantizing.choosing import Between, Costs, LayerCost

TYPES = ("float32", "static", "dynamic")


def random_costs(seed: int, count: int = 6) -> Costs:
    rng = np.random.default_rng(seed)
    layers = [SimpleNamespace(name=f"layer{i}") for i in range(count)]
    table = [
        {
            type_: LayerCost(rng.uniform(0.5, 2), 0.0 if k == 0 else rng.uniform(0, 1), 4 - k)
            for k, type_ in enumerate(TYPES)
        }
        for _ in layers
    ]
    edges = [(i, j) for i in range(count) for j in range(i + 1, count) if rng.random() < 0.5]
    between = [Between(i, j, *rng.uniform(0, 1, 3)) for i, j in edges]
    return Costs(layers, table, between)


def every_choice(costs: Costs):
    names = [layer.name for layer in costs.layers]
    return [dict(zip(names, types, strict=True)) for types in product(TYPES, repeat=len(names))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weight", [0.0, 1.0, 10.0])
def test_choice_has_the_least_sum(seed, weight):
    costs = random_costs(seed)

    def total(choice):
        own = costs.total(choice)
        return own.seconds + weight * own.error

    assert total(costs.choose(weight)) == pytest.approx(min(map(total, every_choice(costs))))


def test_graphs_too_wide_to_eliminate_are_descended(monkeypatch):
    costs = random_costs(3)
    best = costs.total(costs.choose(1.0))
    monkeypatch.setattr(choosing, "_ENTRIES", 1)
    found = costs.total(costs.choose(1.0))
    assert found.seconds + found.error <= 1.2 * (best.seconds + best.error)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.5, 100.0])
def test_fastest_within_keeps_the_budget(budget):
    costs = random_costs(1)
    own = costs.total(costs.fastest_within(budget))
    assert own.error <= budget
    floats = costs.total({layer.name: "float32" for layer in costs.layers})
    assert own.seconds <= floats.seconds


def test_conversions_are_paid_where_one_side_is_static():
    between = Between(0, 1, 1.0, 2.0, 4.0)
    assert between.seconds("static", "static") == 1.0
    assert between.seconds("float32", "static") == between.seconds("static", "dynamic") == 6.0
    assert between.seconds("float32", "dynamic") == 2.0
