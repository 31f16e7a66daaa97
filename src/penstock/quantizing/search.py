"""The search for the types of layers: candidates, measurements, and the choice.

::

    ranges of values        observed in the calibration samples
    clipping                the method with the least error if all layers are static
    smoothing               between activations and weights, if that reduces the error
    seconds of each layer   with each type, in runs of the model with this type wherever possible
    the fastest choice      by a minimal sum of seconds; taken if its error is within the bound
    errors of each layer    of the outputs, with only this layer as codes
    choices in between      by minimal sums of seconds and weighted errors, bisected
    stored weights          of float32 layers: in 8 bits if the error allows it, else in 16

Each choice is measured on the calibration samples and on the held-out samples. The limit for the
error of a further sample, estimated from the errors of all of these, must be within the bound.

Measurements are kept in a ``Record``, which can be saved and loaded to resume a stopped search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter

import numpy as np

from penstock.core.checkpoints import checkpoint, report_progress
from penstock.core.records import cached_property, dataclass, field, replace
from penstock.host.malloc import give_back_memory
from penstock.ir.graph import Graph, Model
from penstock.quantizing.calibration import CLIPPINGS, Statistics, clipped, observe
from penstock.quantizing.choosing import Costs, LayerCost
from penstock.quantizing.costs import Conversions, NodeSeconds, by_node, layer_costs
from penstock.quantizing.layers import STORING, Choice, LayerType, QuantizableLayer
from penstock.quantizing.measuring import (
    FloatReference,
    Metric,
    error_limit,
    seconds_in_turns,
    step_seconds_of,
)
from penstock.quantizing.record import FLOAT, ChosenRanges, Point, Record
from penstock.quantizing.rewriting import (
    Biases,
    GraphRewriter,
    Rewriter,
    Rewritten,
    ValueRange,
    ValueRanges,
)
from penstock.quantizing.rounding import gram_matrices
from penstock.quantizing.samples import Samples, held_out_apart
from penstock.quantizing.smoothing import Factors, smoothed, smoothing_factors
from penstock.quantizing.source import constant_bytes
from penstock.quantizing.weights import bias_correction, learned
from penstock.session.session import Session

UNIFORM: tuple[LayerType, ...] = ("static", "dynamic", "bfloat16", "blocks8", "weights8")
"""types that are tried everywhere, at first"""
# Samples for the error of one layer (at least), of one clipping method, and of a choice, besides
# the held-out ones. For layers and clipping, fast models use more: as many as fit into _BRIEF.
_FEW, _SOME, _MANY = 4, 12, 24
_BRIEF = 0.05
_BISECTIONS = 8
# The cost of a byte of weights in seconds: all else equal, fewer bytes are better.
_SIZE_WEIGHT = 1e-13
_CLOSE = 1.3  # budgets of errors between which nothing more is tried
_DOUBLINGS = 40
# Rounds in which the seconds of conversions are learned, and by how much each may change them.
_ROUNDS, _MOST_SCALE = 4, 8.0
_FREE = 1 << 26  # bytes of free memory that are kept between two candidates
_TIME_SHARE = 1e-6  # errors that a second counts, where time hardly matters
_ROOM = 0.8  # part of the error for types that are faster, beside that of weights that are stored
_SKIPS = 3  # times that layers are stored, each without a layer that had too large an error
_SAME = 1.05  # the ratio of times up to which a choice counts as equally fast
_NEARLY = 1.02  # the ratio of times up to which either of two choices may be taken
_REAL = ("float32", "weights16")  # types with which a layer computes the same
# The types that store the same layers as codes, at the same speed.
_CODES_OF: Mapping[LayerType, LayerType] = {
    "float32": "weights8",
    "weights16": "weights8",
    "bfloat16": "bfloat16x8",
}
_STORED = "with stored weights"
_LEARNING = 0.5  # part of the time for layers that may be used to learn roundings
_MATTERING = 0.98  # part of the bytes of weights in layers that are worth measuring alone


@dataclass(frozen=True)
class Goal:
    """Goal of a search: an error of at most ``max_error``; a run that takes at most ``time`` of the
    original's; weights with at most ``size`` of its bytes. None if it does not matter."""

    max_error: float | None = None
    time: float | None = None
    size: float | None = None


Compile = Callable[[Model], Session]
_Typed = tuple[QuantizableLayer, LayerType]


@dataclass(eq=False)
class Search:
    """A search for one model. ``original`` is its session; ``model`` has the folded graph;
    ``rewriter`` rewrites it for each choice, by default to ONNX."""

    original: Session
    model: Model
    samples: Samples
    goal: Goal
    compile: Compile
    metric: Metric | None = None
    record: Record = field(default_factory=Record)
    rewriter: Rewriter | None = None

    def __post_init__(self) -> None:
        # The folded graph is rewritten; times and errors are compared with the original.
        self.graph = self.model.graph
        self.forms = self.rewriter or GraphRewriter(self.graph)
        self.layers: Sequence[QuantizableLayer] = self.forms.layers
        self.chosen_by, self.held = map(self.samples.subset, held_out_apart(len(self.samples)))
        self.sample = self.samples.read(0)
        self.ranges: ValueRanges = {}
        self.biases: Biases = {}
        self.has_learned = False
        # Sizes include all constants, mostly weights of layers. The original file may be smaller
        # than the folded graph: float16, or one matrix for several uses.
        self.base = constant_bytes(self.original.model.graph)
        floats = sum(layer.nbytes("float32") for layer in self.layers)
        self.others = constant_bytes(self.form({}).graph) - floats
        self.seconds: dict[LayerType, NodeSeconds] = {}
        # The times until which layers are measured one by one, and until which choices among them
        # are tried. The rest of the time to a deadline is for the storage of weights.
        self.layers_until = self.choices_until = math.inf

    def leave_out(self, types: Collection[LayerType]) -> None:
        """Let no layer have one of the types."""
        self.layers = [
            own._replace(types=[t for t in own.types if t not in types]) for own in self.layers
        ]

    # Forms of the model.

    def form(
        self, choice: Choice, ranges: ValueRanges | None = None, biases: Biases | None = None
    ) -> Rewritten:
        """The graph with these types of layers."""
        give_back_memory(_FREE)  # of the candidate before
        if not self.has_learned and not {*self.record.learned}.isdisjoint(choice.items()):
            self.learn_again()
        ranges = self.ranges if ranges is None else ranges
        biases = self.biases if biases is None else biases
        return self.forms.rewritten(choice, ranges, biases)

    def with_graph(self, form: Rewritten) -> Model:
        return replace(self.model, graphs={self.model.entry: form.graph})

    def session(self, choice: Choice) -> Session:
        return self.compile(self.with_graph(self.form(choice)))

    def uniform(self, type_: LayerType) -> dict[str, LayerType]:
        """This type for all layers that can have it."""
        return {layer.name: type_ for layer in self.layers if type_ in layer.types}

    @cached_property
    def folded(self) -> Session:
        """The session of the folded graph."""
        # Values of the original and of the rewritten graph may have different names.
        return self.compile(self.model)

    # Roundings that are learned.

    def learn(self, layers: Sequence[QuantizableLayer], types: Sequence[LayerType]) -> None:
        """Learn the codes of weights from samples, for layers of some types, if a deadline leaves
        time for it. From then on, layers of these types use the learned codes."""
        wanted = [(own.name, t) for own in layers for t in types if t in own.types]
        if not wanted or self.record.learned:
            return
        now = perf_counter()
        # Errors of layers are measured after it.
        self.record.learned = self.learned_of(wanted, now + _LEARNING * (self.layers_until - now))
        self.record.changed()

    def learn_again(self) -> None:
        """Learn codes as in the record, unless done already: the file does not contain codes."""
        if not self.has_learned:
            self.learned_of(self.record.learned, math.inf)

    def learned_of(
        self, wanted: Sequence[tuple[str, LayerType]], until: float
    ) -> list[tuple[str, LayerType]]:
        """Learn the codes of layers as types, until some time. Returns the learned ones."""
        begin = perf_counter()
        types: dict[str, list[LayerType]] = {}
        for name, type_ in wanted:
            types.setdefault(name, []).append(type_)
        layers, done = [own for own in self.layers if own.name in types], []
        for layer, gram in gram_matrices(self.folded, layers, self.chosen_by):
            checkpoint()
            if perf_counter() > until:
                break
            for type_ in types[layer.name]:
                self.forms.learn(layer, type_, learned(layer, type_, gram, self.forms.shifts))
                done.append((layer.name, type_))
        self.has_learned = True
        self.record.learning_seconds = perf_counter() - begin
        return done

    # The steps of the search.

    def run(self) -> Point:
        """The best choice that meets the goal, if any does."""
        checkpoint()
        report_progress("run the float model", 0, 1)
        every = FloatReference.of(self.original, self.samples, self.metric)
        self.whole, self.reference_held = map(every.subset, held_out_apart(len(self.samples)))
        self.reference_held.check_finite()
        self.reference = self.whole.spread_out(_MANY)
        (seconds,) = seconds_in_turns([self.original], self.sample, _BRIEF)
        self.reference_of_some, self.reference_of_few = [
            self.reference.spread_out(max(_FEW, min(_SOME, int(most / seconds))))
            for most in (_SOME * _BRIEF, _BRIEF)
        ]
        self.choose_ranges()
        self.measure_seconds()
        if self.goal.size is not None:
            learning = [own for own in self.layers if own.learns]
            self.learn(learning, ["weights8", "blocks8", "blocks4"])
        return self.choose()

    def choose_ranges(self) -> None:
        """Observe the values that may be codes, choose the way to clip their ranges, and whether to
        correct biases and to smooth activations."""
        record = self.record
        if record.smoothing:
            self.smooth({name: np.array(f, np.float32) for name, f in record.smoothing.items()})
        if self.forms.coded(self.uniform("static")) and not record.ranges:
            record.take(self.best_ranges(""))
            factors: Factors = {}
            if self.rewriter is None:
                factors = smoothing_factors(self.folded, self.graph, self.chosen_by)
            if factors:
                plain, before = self.graph, record.clippings[record.clipping]
                self.smooth(factors)
                other = self.best_ranges("smoothed, ")
                if record.clippings[other.clipping] < before:
                    record.take(other)
                    record.smoothing = {name: own.tolist() for name, own in factors.items()}
                else:
                    self.use(plain)
            record.changed()
        self.ranges = {name: ValueRange(*own) for name, own in record.ranges.items()}
        self.biases = {name: np.array(own, np.float32) for name, own in record.biases.items()}

    def smooth(self, factors: Factors) -> None:
        """Go on with the smoothed graph."""
        self.use(smoothed(self.graph, factors))

    def use(self, graph: Graph) -> None:
        """Go on with another graph, of the same layers."""
        self.graph, self.model = graph, replace(self.model, graphs={self.model.entry: graph})
        self.forms = GraphRewriter(graph)
        types = {own.name: own.types for own in self.layers}
        self.layers = [own._replace(types=types[own.name]) for own in self.forms.layers]
        self.__dict__.pop("folded", None)

    def best_ranges(self, prefix: str) -> ChosenRanges:
        """The ranges of values, and the biases, with the least error where all layers are static.
        Names of ways to choose them begin with ``prefix``."""
        static = self.uniform("static")
        axes = {
            layer.x.name: layer.channels
            for layer in self.layers
            if layer.name in static and layer.x is not None
        }
        # From all samples: any of them may have the extreme values.
        statistics = observe(self.folded, self.forms.coded(static), self.chosen_by, axes)
        corrections = self.corrections(statistics)
        ways = [(f"{prefix}{name}", clipped(statistics, name)) for name in CLIPPINGS]
        errors = [self.static_error(way, ranges, {}) for way, ranges in ways]
        # Biases are only corrected for the best ranges: the two hardly depend on each other.
        best, ranges = ways[errors.index(min(errors))]
        corrected = f"{best}, biases corrected"
        biases = {}
        if self.static_error(corrected, ranges, corrections) < min(errors):
            biases = {name: own.tolist() for name, own in corrections.items()}
            best = corrected
        return ChosenRanges(
            {name: (own.low, own.high) for name, own in ranges.items()},
            {name: own.size for name, own in statistics.items()},
            best,
            biases,
        )

    def static_error(self, way: str, ranges: ValueRanges, biases: Biases) -> float:
        """The error of static layers with ranges that were chosen in some ``way``."""
        done, whole = len(self.record.clippings), len(CLIPPINGS) + 1
        report_progress("choose ranges", done, whole if done < whole else 2 * whole)
        session = self.compile(self.with_graph(self.form(self.uniform("static"), ranges, biases)))
        error = math.sqrt(self.reference_of_some.mean_square(session))
        self.record.clippings[way] = error
        return error

    def corrections(self, statistics: Statistics) -> dict[str, np.ndarray]:
        """The corrections of the biases of layers whose inputs were observed."""
        found = {}
        for layer in self.layers:
            own = None if layer.x is None else statistics.get(layer.x.name)
            if own is None or not own.means:
                continue
            means, groups = np.mean(own.means, axis=0), layer.node.attrs.get("group", 1)
            correction = bias_correction(layer.weights, layer.axis, groups, means)
            if correction is not None:
                found[layer.name] = correction
        return found

    def measure_seconds(self) -> None:
        """Measure the seconds of layers with each type."""
        types: tuple[LayerType, ...] = ("float32", *UNIFORM)
        if self.goal.size is not None:
            types = (*types, "blocks4")
        known = self.record.seconds
        computing = {own.name for own in self.layers if own.x is not None}
        for i, type_ in enumerate(types):
            report_progress("measure layers", i, len(types))
            choice = {} if type_ == "float32" else self.uniform(type_)
            if type_ == "weights8" and choice:
                # Products and convolutions compute the same.
                choice = {n: t for n, t in choice.items() if n not in computing}
                if not choice:
                    known.setdefault(type_, known["float32"])
            if type_ not in known and (choice or type_ == "float32"):
                known[type_] = self.measured_seconds(choice)
                self.record.changed()
        self.seconds = {t: NodeSeconds(*own) for t, own in known.items()}

    def measured_seconds(self, choice: Choice) -> NodeSeconds:
        """The seconds of layers, and of other nodes, in runs with some types of layers."""
        form = self.form(choice)
        # Do not create another float32 session: each has its own weights.
        is_float = not choice and self.rewriter is None
        session = self.folded if is_float else self.compile(self.with_graph(form))
        return by_node(self.graph, self.layers, form, step_seconds_of(session, self.sample))

    def costs(self, conversion_scale: float | None = None) -> Costs:
        """The costs of all types; types that only store weights are included if size matters."""
        scale = self.record.conversion_scale if conversion_scale is None else conversion_scale
        seconds = dict(self.seconds)
        if self.goal.size is None:
            seconds.pop("weights8", None)
        else:
            seconds["weights16"] = seconds["float32"]
        conversions = Conversions(self.record.sizes, scale)
        return layer_costs(self.layers, seconds, self.record.errors, conversions)

    def point(self, choice: Choice, note: str) -> Point:
        """Measure a choice, unless that was done: its error, its time, its size."""
        key = {name: type_ for name, type_ in sorted(choice.items()) if type_ != "float32"}
        # Weights differ, and a search that is resumed asks for the same choices again.
        known = next((p for p in self.record.points if p.choice == key), None)
        if known is not None:
            return known
        checkpoint()
        report_progress(f"try {note}", len(self.record.points), len(self.record.points) + 1)
        session = self.session(key)
        bound = self.goal.max_error
        error, held_out, limit = self.errors(session, self.reference)
        # Most choices that fail do so on a few samples; those that do not must hold on all.
        if bound is not None and limit <= bound and len(self.whole.samples) > _MANY:
            error, held_out, limit = self.errors(session, self.whole)
        # In turn with the original each time, since the load of the machine varies.
        own, original = seconds_in_turns([session, self.original], self.sample)
        size = constant_bytes(session.model.graph)
        ratio = size / self.base if self.base else 1.0
        point = Point(key, own / original, error, held_out, limit, ratio, note)
        self.record.points.append(point)
        self.record.changed()
        return point

    def errors(self, session: Session, reference: FloatReference) -> tuple[float, float, float]:
        """The error on the samples for choosing, the error on held-out samples, and the bound for
        further samples. A metric is over all samples together, and bounds no single one."""
        if self.metric is not None:
            error, held_out = reference.measured(session), self.reference_held.measured(session)
            return error, held_out, max(error, held_out)
        chosen_by, held = reference.rms(session), self.reference_held.rms(session)
        # A single sample is both.
        every = chosen_by if len(self.samples) == 1 else [*chosen_by, *held]
        return max(chosen_by), max(held), error_limit(every)

    def measure_errors(self) -> None:
        """For each layer, the error of the outputs if only this layer is codes."""
        gains = [
            (cost.seconds - own["float32"].seconds, layer.name, type_)
            for layer, own in zip(self.layers, self.costs().table, strict=True)
            for type_, cost in own.items()
            if self.may_matter(type_, cost, own)
        ]
        # The largest gains first: there may not be time for all.
        self.measure_each([(name, type_) for _, name, type_ in sorted(gains)])

    def measured(self, costs: Costs) -> Costs:
        """The costs, without the types that may matter but were not measured."""
        errors = self.record.errors
        table: list[Mapping[LayerType, LayerCost]] = [
            {
                type_: cost
                for type_, cost in own.items()
                if type_ in errors.get(layer.name, {}) or not self.may_matter(type_, cost, own)
            }
            for layer, own in zip(self.layers, costs.table, strict=True)
        ]
        return replace(costs, table=table)

    def measure_each(self, wanted: Sequence[tuple[str, LayerType]]) -> None:
        """For each of several layers, the error of the outputs if only this layer has a type."""
        errors = self.record.errors
        wanted = [(name, type_) for name, type_ in wanted if type_ not in errors.get(name, {})]
        for i, (name, type_) in enumerate(wanted):
            report_progress("measure errors of layers", i, len(wanted))
            checkpoint()
            if perf_counter() > self.layers_until:
                return
            session = self.session({name: type_})
            errors.setdefault(name, {})[type_] = self.reference_of_few.mean_square(session)
            self.record.changed()

    def may_matter(
        self, type_: LayerType, cost: LayerCost, others: Mapping[LayerType, LayerCost]
    ) -> bool:
        """Whether a layer may have this type: it is faster than float32, or smaller."""
        if type_ in ("float32", "weights16"):  # float16 makes next to no error
            return False
        return self.goal.size is not None or cost.seconds < others["float32"].seconds

    # The choice.

    def choose(self) -> Point:
        """The best choice that meets the goal, among the points near it that were tried."""
        if self.goal.max_error is not None:
            return self.fastest_within(self.goal.max_error)
        if self.goal.time is None:
            # A result in case the deadline comes while errors of layers are measured.
            self.point(self.uniform("weights8"), "weights in 8 bits")
        self.measure_errors()
        if self.goal.time is not None:
            return self.least_error_in_time()
        assert self.goal.size is not None
        return self.least_error_of_size(self.goal.size)

    def meets(self, point: Point) -> bool:
        """Whether a point meets the goal, on all samples."""
        goal = self.goal
        if goal.max_error is not None and point.limit > goal.max_error:
            return False
        return point.size <= (goal.size or math.inf) and point.time <= (goal.time or math.inf)

    def fastest_within(self, bound: float) -> Point:
        """The fastest choice with errors of at most ``bound``."""
        fastest, weight = self.fastest(), self.size_weight()
        if fastest.limit > bound:
            static, dynamic = self.uniform("static"), self.uniform("dynamic")
            if dynamic:
                self.point({**static, **dynamic}, "codes over the range of each run")
            # Before errors of layers: a result in case the deadline passes while measuring them.
            halves = self.uniform("weights16")
            self.point(halves, "weights in 16 bits")
            if "bfloat16" in self.seconds:
                rounded = self.uniform("bfloat16")
                self.point({**halves, **rounded}, "operands in bfloat16")
            self.measure_errors()
            # The error of the model is not the sum of the errors of layers, but grows with it:
            # bisect the budget for the sum until the measured error fits.
            costs = self.measured(self.costs())
            low, high = 0.0, max(self.costs().total(fastest.choice).error, bound * bound)
            budget = min(bound * bound if self.metric is None else high / 4, high / 2)
            for _ in range(_BISECTIONS):
                if perf_counter() > self.choices_until:
                    break
                point = self.point(
                    costs.fastest_within(budget, weight), f"errors up to {budget:.2g}"
                )
                if point.limit <= _ROOM * bound:
                    low = budget
                else:
                    high = budget
                if low and high / low < _CLOSE:
                    break
                budget = math.sqrt(low * high) if low else high / 4
            if low and perf_counter() < self.choices_until:
                # The learned costs of conversions may be wrong for some of them.
                guessed = self.measured(self.costs(conversion_scale=1.0))
                self.point(guessed.fastest_within(low, weight), "the same with guessed conversions")
            return self.smaller(self.best_with_room(bound), bound)
        return self.smaller(self.best(bound), bound)

    def best_with_room(self, bound: float) -> Point:
        """The best point that leaves room in the error for stored weights, if it is about as fast
        as the best one."""
        best, other = self.best(bound), self.best(_ROOM * bound)
        return other if other.choice and other.time <= _SAME * best.time else best

    def fastest(self) -> Point:
        """The fastest choice, whatever its errors. What conversions take is learned meanwhile: the
        model is as slow as they were guessed too fast."""
        static, dynamic = self.uniform("static"), self.uniform("dynamic")
        codes = self.point({**dynamic, **static}, "codes everywhere")
        tried = [codes]
        for _ in range(_ROUNDS):
            costs = self.costs()
            point = self.point(costs.choose(0.0, self.size_weight()), "the fastest by costs")
            if point in tried:
                break
            tried.append(point)
            # In seconds of the costs, which are all off by about the same factor.
            unit = costs.total(codes.choice).seconds / codes.time
            conversions = costs.conversions(point.choice)
            missing = point.time * unit - costs.total(point.choice).seconds
            if missing <= 0 or not conversions:
                break
            self.record.conversion_scale *= min(1 + missing / conversions, _MOST_SCALE)
        return min(tried, key=lambda p: p.time)

    def best(self, bound: float) -> Point:
        """The best of the points with errors of at most ``bound`` that are no slower than the
        original: at least the float model itself."""
        # Whatever the sums have promised, only points that were measured count.
        points = [p for p in self.record.points if p.limit <= bound and self.is_no_slower(p)]
        if self.goal.size is not None:
            points = [p for p in points if p.size <= self.goal.size] or points
        return fastest_of(points) if points else self.unchanged()

    def is_no_slower(self, point: Point) -> bool:
        """Whether a point was no slower than the original. Without codes, and with halves that are
        widened when the model is loaded, it computes the same, whatever was measured."""
        return point.time <= 1 or {*point.choice.values()} <= {*_REAL}

    def instead(self, point: Point, time: float) -> Point | None:
        """Return a replacement for a point that was slower than the original in a second
        measurement, or None. The fastest of many measurements may have been lucky; points that only
        store weights compute the same as the original.
        """
        codes = {*point.choice.values()} - {"float32", *STORING}
        if time <= 1 or not codes or self.goal.max_error is None:
            return None
        points = self.record.points
        points[points.index(point)] = replace(point, time=time)
        self.record.changed()
        other = self.best(self.goal.max_error)
        if perf_counter() < self.choices_until:  # else there may be no time to learn roundings
            other = self.smaller(other, self.goal.max_error)
        return other if self.meets(other) else None

    def unchanged(self) -> Point:
        """The float model, in whose file equal weights are one."""
        known = next((p for p in self.record.points if not p.choice), None)
        if known is not None or not self.base:
            return known or FLOAT
        size = constant_bytes(self.session({}).model.graph) / self.base
        return replace(FLOAT, size=size)

    def smaller(self, point: Point, bound: float) -> Point:
        """Return the point with the weights of its float32 layers stored in 16 bits, or those of
        float32 and bfloat16 in 8, if the error allows it."""
        halved: list[_Typed] = []
        coded: list[_Typed] = []
        for own in self.layers:
            type_ = point.choice.get(own.name, "float32")
            codes = _CODES_OF.get(type_)
            if codes is not None and codes in own.types and self.stores_codes(own):
                coded.append((own, codes))
            if type_ in _REAL and "weights16" in own.types:
                halved.append((own, "weights16"))

        def fits(tried: Point) -> bool:
            return tried.limit <= bound and tried.time <= max(_SAME * point.time, 1.0)

        # Before roundings are learned: a result in case the deadline passes meanwhile.
        best = self.stored(point, halved, fits)
        self.learn([own for own, _ in coded if own.learns], ["weights8"])
        return self.stored(best, coded, fits)

    def stored(
        self, point: Point, wanted: Sequence[_Typed], fits: Callable[[Point], bool]
    ) -> Point:
        """The point, with as many layers stored as the types wanted for them as still fits, those
        first that make the least error for a byte."""

        def tried(some: Sequence[_Typed]) -> Point:
            return self.point({**point.choice, **{own.name: t for own, t in some}}, _STORED)

        if not wanted or fits(best := tried(wanted)):
            return best if wanted else point
        wanted, best = self.by_error(wanted), point
        kept: list[_Typed] = []
        for _ in range(_SKIPS):
            low, high = 0, len(wanted) + 1
            while high - low > 1:
                middle = (low + high) // 2
                if fits(more := tried([*kept, *wanted[:middle]])):
                    best, low = more, middle
                else:
                    high = middle
            # Errors do not quite add up: without the next layer, those behind it may fit.
            kept, wanted = [*kept, *wanted[:low]], wanted[low + 1 :]
        return best

    def stores_codes(self, layer: QuantizableLayer) -> bool:
        """Whether a run is as fast with a layer's weights as codes. Nearly all layers compute the
        same; rows of tables are made of codes in each run, which may take next to no part of it."""
        real = self.seconds["float32"]
        before, after = (
            self.seconds.get(type_, real).layers.get(layer.name, 0.0)
            for type_ in ("float32", "weights8")
        )
        whole = sum(real.layers.values()) + sum(real.others.values())
        slower = after - before
        return layer.node.op.name != "Gather" or slower <= (_SAME - 1) * max(before, whole / 10)

    def by_error(self, wanted: Sequence[_Typed]) -> list[_Typed]:
        """Layers by the error that they make as their types for a byte, the least first, and then
        those that were not measured, without those that have next to no weights."""
        wanted = sorted(wanted, key=lambda each: each[0].nbytes("float32"), reverse=True)
        enough = _MATTERING * sum(own.nbytes("float32") for own, _ in wanted)
        so_far = 0.0
        large = []
        for own, type_ in wanted:
            if so_far < enough:
                large.append((own, type_))
            so_far += own.nbytes("float32")
        self.measure_each([(own.name, type_) for own, type_ in large])

        def error_for_a_byte(each: _Typed) -> float:
            own, type_ = each
            error = self.record.errors.get(own.name, {}).get(type_, math.inf)
            return error / own.nbytes("float32")

        return sorted(large, key=error_for_a_byte)

    def room(self, share: float) -> float:
        """The bytes that the weights of layers may have where all constants may have a share of the
        original's."""
        return share * self.base - self.others

    def size_weight(self) -> float:
        """The weight of a byte: as much as makes the choice meet the size, if one is wanted."""
        if self.goal.size is None:
            return _SIZE_WEIGHT
        weight, costs = _SIZE_WEIGHT, self.costs()
        for _ in range(_DOUBLINGS):
            if costs.total(costs.choose(0.0, weight)).nbytes <= self.room(self.goal.size):
                break
            weight *= 4
        return weight

    def least_error_in_time(self) -> Point:
        """The choice of least error that takes at most the wanted share of the original's time,
        with the size that is wanted, if one is."""
        fastest, costs, size = self.fastest(), self.measured(self.costs()), self.size_weight()
        low, high = 1e-9, 1e9
        for _ in range(_BISECTIONS):
            weight = math.sqrt(low * high)
            point = self.point(costs.choose(weight, size), f"{weight:.2g} s for an error of 1")
            if self.meets(point):
                low = weight
            else:
                high = weight
        meeting = [point for point in self.record.points if self.meets(point)]
        return min(meeting, key=lambda point: point.limit) if meeting else fastest

    def least_error_of_size(self, share: float) -> Point:
        """The choice of least error with at most ``share`` of the bytes of weights."""
        costs = self.measured(self.costs())
        low, high = 1e-20, 1.0  # squared error for a byte
        # The size is known without a run, so only the last choice must be measured.
        choice = costs.choose(1.0, high, _TIME_SHARE)
        for _ in range(_DOUBLINGS):
            weight = math.sqrt(low * high)
            tried = costs.choose(1.0, weight, _TIME_SHARE)
            if costs.total(tried).nbytes <= self.room(share):
                choice, high = tried, weight
            else:
                low = weight
        return self.point(choice, "the least error of this size")


def fastest_of(points: Sequence[Point]) -> Point:
    """The smallest of the points that are nearly as fast as the fastest one."""
    least = min(point.time for point in points)
    return min((p for p in points if p.time <= _NEARLY * least), key=lambda p: p.size)
