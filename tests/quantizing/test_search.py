"""The search: what it tries, and what it chooses. Times are made up, so that nothing depends on the
machine."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.core.records import replace
from penstock.frontends.onnx.writer import onnx_bytes
from penstock.quantizing import search as searching
from penstock.quantizing.costs import NodeSeconds
from penstock.quantizing.layers import ROUNDING
from penstock.quantizing.measuring import FloatReference, error_limit
from penstock.quantizing.record import FLOAT, Record
from penstock.quantizing.samples import held_out_apart, samples_of
from penstock.quantizing.search import Goal, Search
from penstock.quantizing.source import float_model
from tests.support.exact_runtime import exact_session
from tests.support.quantizable import convolutional, images, with_weights

SPEED = {"float32": 1.0, "static": 0.3, "dynamic": 0.5, "blocks8": 0.8, "weights8": 1.0}


@pytest.fixture
def search(monkeypatch):
    """A search whose layers take made-up times."""
    model = ps.load(convolutional())
    folded = float_model(model)
    compile_ = partial(ps.compile, threads=1, cache=False)
    own = Search(compile_(model), folded, samples_of([*images(8)], ["x"]), Goal(0.02), compile_)

    def measure_seconds(self):
        for type_, share in SPEED.items():
            layers = {layer.name: share for layer in self.layers}
            self.seconds[type_] = NodeSeconds(layers, {}, {})

    def seconds(sessions, sample, *_):
        shares = []
        for session in sessions:
            names = [node.op.name for node in session.model.graph.nodes]
            codes = names.count("QuantizeLinear") + names.count("DynamicQuantizeLinear")
            shares.append(1.0 - 0.05 * codes)
        return shares

    monkeypatch.setattr(Search, "measure_seconds", measure_seconds)
    monkeypatch.setattr(searching, "seconds_in_turns", seconds)
    return own


def test_fastest_choice_is_taken_if_its_error_is_small(search):
    point = search.run()
    assert {*point.choice.values()} == {"static"}
    assert point.limit <= 0.02
    assert search.record.errors == {}  # no layer had to be looked at alone


def test_choice_must_be_within_the_bound_on_all_samples(search, monkeypatch):
    monkeypatch.setattr(searching, "_MANY", 1)
    first, *others = images(8)
    rare = [x * 40 for x in others]
    search.samples = samples_of([first, *rare], ["x"])
    search.__post_init__()
    point = search.run()
    every = FloatReference.of(search.original, search.samples)
    errors = every.rms(search.session(point.choice))
    assert point.error == pytest.approx(max(errors[i] for i in held_out_apart(8)[0]))
    assert point.held_out == pytest.approx(max(errors[i] for i in held_out_apart(8)[1]))
    assert point.limit == pytest.approx(error_limit(errors))
    assert max(errors) < point.limit <= 0.02


def test_layers_stay_float_until_the_error_is_within_the_bound(search):
    search.goal = Goal(0.001)
    point = search.run()
    assert point.limit <= 0.001
    tried = search.record.points
    assert max(p.limit for p in tried) > 0.001
    assert point.time == min(p.time for p in tried if p.limit <= 0.001)
    assert search.record.errors.keys() == {layer.name for layer in search.layers}


def test_float_model_is_kept_if_no_choice_is_within_the_bound(search):
    search.goal = Goal(1e-9)
    assert search.run() is FLOAT or search.run().choice == {}


def test_choices_slower_than_the_original_are_not_taken(search, monkeypatch):
    monkeypatch.setattr(
        searching, "seconds_in_turns", lambda sessions, *_: [2.0, 1.0][-len(sessions) :]
    )
    assert search.run().choice == {}


def test_weights_are_stored_if_choices_turn_out_slower_than_the_original(search):
    point, tried = search.run(), 0
    while (other := search.instead(point, 1.2)) is not None:
        point, tried = other, tried + 1
    assert tried
    assert {*point.choice.values()} == {"weights8"}
    assert point.limit <= 0.02 and point.size < 0.3


def test_least_error_in_a_time(search):
    search.goal = Goal(time=0.85)
    point = search.run()
    assert point.time <= 0.85
    assert point.error <= min(p.error for p in search.record.points if p.time <= 0.85)


def test_least_error_of_a_size(search):
    search.goal = Goal(size=0.5)
    point = search.run()
    assert point.size <= 0.5
    whole = search.uniform("weights8")
    assert point.error > 0
    assert len(point.choice) <= len(whole)


def test_ranges_and_biases_are_chosen_by_error(search):
    search.run()
    record = search.record
    assert len(record.clippings) == 5
    assert record.clippings[record.clipping] == min(record.clippings.values())
    assert bool(record.biases) == record.clipping.endswith("corrected")


def test_search_goes_on_from_a_record(search):
    search.goal = Goal(0.001)
    first = search.run()
    calls = []
    session = Search.session
    again = Search(
        search.original,
        search.model,
        search.samples,
        search.goal,
        search.compile,
        record=search.record,
    )
    again.session = lambda choice: calls.append(choice) or session(again, choice)
    assert again.run() == first
    assert calls == []


@pytest.mark.costly
def test_weights_are_stored_in_16_bits_where_8_have_too_large_an_error(search, monkeypatch):
    monkeypatch.setitem(SPEED, "static", 2.0)
    monkeypatch.setitem(SPEED, "dynamic", 2.0)
    monkeypatch.setattr(searching, "seconds_in_turns", lambda sessions, *_: [1.0] * len(sessions))
    reference = search.original
    sizes, types = {}, {}
    for bound in (1e-4, 3e-4, 2e-3):
        search.goal, search.record = Goal(bound), Record()
        search.has_learned = False
        point = search.run()
        assert point.limit <= bound
        sizes[bound], types[bound] = point.size, {*point.choice.values()}
        # What is said is what is measured, on ONNX Runtime, too.
        data = onnx_bytes(search.with_graph(search.form(point.choice)))
        theirs = exact_session(data)
        x = search.sample["x"]
        spread = search.reference.spreads["y"]
        error = theirs.run(None, {"x": x})[0] - reference(x)
        assert np.sqrt(np.square(error).mean()) / spread <= bound * 1.01
    assert types == {1e-4: {"weights16"}, 3e-4: {"weights16", "weights8"}, 2e-3: {"weights8"}}
    assert sizes[2e-3] < 0.28 < sizes[3e-4] <= 0.5 < sizes[1e-4] < 1


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """Layers of bfloat16 are the fastest ones."""
    for type_, share in (("static", 2.0), ("dynamic", 2.0), ("blocks8", 2.0), ("bfloat16", 0.5)):
        monkeypatch.setitem(SPEED, type_, share)

    def seconds(sessions, *_):
        names = [[node.op.name for node in own.model.graph.nodes] for own in sessions]
        return [2.0 if "QuantizeLinear" in own else 1.0 - ("Cast" in own) / 10 for own in names]

    monkeypatch.setattr(searching, "seconds_in_turns", seconds)


def test_bfloat16_is_chosen_where_it_is_fastest(search, fast_bfloat16):
    point = search.run()
    rounded = {name for name, type_ in point.choice.items() if type_ == "bfloat16x8"}
    assert rounded == {"point", "last", "dense"}
    assert 0 < point.limit <= 0.02 and point.size < 0.28
    form = search.form(point.choice)
    model, x = search.with_graph(form), search.sample["x"]
    (theirs,) = exact_session(onnx_bytes(model)).run(None, {"x": x})
    wanted = search.original(x)
    np.testing.assert_allclose(ps.compile(model)(x), theirs, atol=1e-5 * np.ptp(wanted))
    assert 0 < np.abs(theirs - wanted).max() < 0.02 * np.ptp(wanted)


def test_weights_of_bfloat16_are_codes_as_far_as_the_error_allows(
    search, fast_bfloat16, monkeypatch
):
    chosen = search.run()
    rounded = [name for name, type_ in chosen.choice.items() if type_ in ROUNDING]

    def errors(self, session, reference):
        codes = [n for n in session.model.graph.nodes if n.op.name == "DequantizeLinear"]
        return (0.001 * len(codes),) * 3

    monkeypatch.setattr(Search, "errors", errors)
    search.record = Record()
    before = search.point(dict.fromkeys(rounded, "bfloat16"), "operands in bfloat16")
    point = search.smaller(before, 0.0025)
    types = Counter(point.choice.values())
    assert types["bfloat16x8"] >= 1 and types["bfloat16x8"] + types["weights8"] == 2
    assert point.limit == 0.002 and point.size < before.size


@pytest.mark.parametrize(("time", "is_taken"), [(0.52, True), (0.6, False)])
def test_types_leave_room_for_stored_weights_unless_that_is_slow(search, time, is_taken):
    types = dict.fromkeys([layer.name for layer in search.layers], "static")
    full = replace(FLOAT, choice=types, time=0.5, limit=0.0199)
    roomy = replace(FLOAT, choice={**types, "another": "dynamic"}, time=time, limit=0.015)
    search.record.points = [FLOAT, full, roomy]
    assert search.best_with_room(0.02) is (roomy if is_taken else full)


def test_float_model_has_equal_weights_once():
    w = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    text = """g (float[n,40] x, float[40,40] w, float[40,40] v) => (float[n,40] y) {
        a = MatMul(x, w) b = Relu(a) s = Transpose(v) y = MatMul(b, s) }"""
    model = ps.load(with_weights(text, w=w, v=np.ascontiguousarray(w.T)))
    data = samples_of([np.ones((2, 40), np.float32)] * 2, ["x"])
    compile_ = partial(ps.compile, cache=False)
    search = Search(compile_(model), float_model(model), data, Goal(0.02), compile_)
    assert search.unchanged().size == 0.5


def test_layers_behind_one_with_too_large_an_error_are_stored(search, monkeypatch):
    names = [f"layer{i}" for i in range(6)]
    wanted = [(SimpleNamespace(name=name), "weights8") for name in names]
    monkeypatch.setattr(search, "by_error", lambda wanted: wanted)
    monkeypatch.setattr(search, "point", lambda choice, _: SimpleNamespace(choice=choice))
    without = {"layer1", "layer4"}
    best = search.stored(
        SimpleNamespace(choice={}), wanted, lambda point: without.isdisjoint(point.choice)
    )
    assert {*best.choice} == {*names} - without


@pytest.mark.parametrize(("others", "stores"), [(1.0, False), (100.0, True)])
def test_tables_are_codes_if_their_rows_take_next_to_no_part_of_a_run(others, stores):
    table = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    text = "g (int64[2] i, float[30,40] w) => (float[2,40] y) { y = Gather(w, i) }"
    model = ps.load(with_weights(text, w=table))
    rows = samples_of([np.array([3, 29])] * 2, ["i"])
    search = Search(ps.compile(model), float_model(model), rows, Goal(0.02), ps.compile)
    (layer,) = search.layers
    search.seconds = {
        type_: NodeSeconds({layer.name: seconds}, {"another": others}, {})
        for type_, seconds in (("float32", 1.0), ("weights8", 1.2))
    }
    assert search.stores_codes(layer) == stores


def test_layers_that_a_deadline_leaves_no_time_for_stay_float(search):
    search.goal, search.layers_until = Goal(0.001), 0.0
    point = search.run()
    assert search.record.errors == {}
    assert point.limit <= 0.001
    assert point.size <= 0.5  # in 16 bits at least
    assert {*point.choice.values()} <= {"weights8", "weights16"}


def test_choices_leave_time_to_store_weights(search, monkeypatch):
    search.goal, search.choices_until = Goal(0.001), 0.0
    point = search.run()
    assert search.record.errors
    assert not [p for p in search.record.points if p.note.startswith("errors up to")]
    assert point.limit <= 0.001 and point.size <= 0.5
    assert "float32" not in [point.choice.get(own.name, "float32") for own in search.layers]


def test_deadline_ends_learning_and_a_size_is_met_nevertheless(search):
    search.goal, search.layers_until = Goal(size=0.3), 0.0
    point = search.run()
    assert search.record.learned == [] and search.record.errors == {}
    fitting = [p for p in search.record.points if search.meets(p)]
    assert fitting and point in search.record.points
    assert {*fitting[0].choice.values()} == {"weights8"}


def test_resumed_search_has_the_codes_that_were_learned(search, monkeypatch):
    search.goal = Goal(size=0.3)
    search.run()
    assert search.record.learned and search.record.learning_seconds > 0
    again = Search(
        search.original,
        search.model,
        search.samples,
        search.goal,
        search.compile,
        record=search.record,
    )
    again.choose_ranges()
    plain = Search(search.original, search.model, search.samples, search.goal, search.compile)
    codes, x = search.uniform("weights8"), search.sample["x"]
    ours, resumed, nearest = [own.session(codes)(x) for own in (search, again, plain)]
    np.testing.assert_array_equal(ours, resumed)
    assert not np.array_equal(ours, nearest)


def test_samples_are_spread_out(search):
    assert len(search.chosen_by) == 6 and len(search.held) == 2
    reference = FloatReference.of(search.original, search.chosen_by)
    few = reference.spread_out(4)
    assert len(few.samples) == 4 and len(reference.spread_out(100).samples) == 6
    np.testing.assert_array_equal(next(iter(few.samples))["x"], search.sample["x"])
    assert few.spreads == reference.spreads
    np.testing.assert_array_equal(few.outputs[3]["y"], reference.outputs[4]["y"])
