"""Models whose state is of fixed size: each stream is answered as ONNX Runtime does it alone."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.stepping.batched import BatchedRunner
from tests.support.decoders import decoder_model
from tests.support.onnx_text import model_from_text
from tests.support.streams import PAST, UNITS, WIDTH, StreamAlone, stream_model
from tests.support.variable_models import MODELS, by_litert, frames_of

LSTM = {"h0": "hn", "c0": "cn"}
STATES = {
    **dict.fromkeys(("lstm", "unnamed", "static"), LSTM),
    "buffer": {"audio_cache_in": "audio_cache_out", "length": "new_length"},
    "dependent": {"state": "state_out"},
}


def stepper_of(kind: str = "lstm", **options: object) -> ps.Stepper:
    return ps.Stepper(ps.load(stream_model(kind)), **options)


def frame_of(kind: str, rng: np.random.Generator, count: int = 1) -> dict[str, np.ndarray]:
    if kind == "buffer":
        audio = rng.standard_normal((count, WIDTH, int(rng.integers(2, 4))))
        return {"audio": audio.astype(np.float32), "rate": np.array(rng.integers(1, 3), np.float32)}
    return {"frame": rng.standard_normal((count, WIDTH)).astype(np.float32)}


def check(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-5)


def feed_all(
    stepper: ps.Stepper, frames: dict[ps.StepSequence, dict[str, np.ndarray]]
) -> dict[ps.StepSequence, dict[str, np.ndarray]]:
    """The outputs of a frame each of several sequences that wait together."""
    ends: dict[ps.StepSequence, tuple] = {}
    for sequence, frame in frames.items():
        sequence.feed(frame, 1, lambda y, e, s=sequence: ends.update({s: (y, e)}))
    while stepper._engine.step():
        pass
    assert not [error for _, error in ends.values() if error]
    return {sequence: outputs for sequence, (outputs, _) in ends.items()}


@pytest.mark.parametrize("backends", [None, ["numpy"]])
@pytest.mark.parametrize("kind", STATES)
def test_sequences_equal_each_stream_alone(kind: str, backends: list[str] | None) -> None:
    rng = np.random.default_rng(0)
    with stepper_of(kind, backends=backends) as stepper:
        assert stepper.state == STATES[kind]
        streams = {stepper.sequence(): StreamAlone(kind, STATES[kind]) for _ in range(5)}
        for _ in range(6):
            frames = {sequence: frame_of(kind, rng) for sequence in streams}
            for sequence, got in feed_all(stepper, frames).items():
                check(got, streams[sequence].step(frames[sequence]))
        assert stepper.reason is None
        assert (stepper.stats.steps, stepper.stats.rows) == (6, 30)


def test_states_stay_where_they_are_while_the_same_sequences_step() -> None:
    rng = np.random.default_rng(0)
    with stepper_of() as stepper:
        runner = stepper._engine.runner
        assert isinstance(runner, BatchedRunner)
        sequences = [stepper.sequence() for _ in range(5)]
        for i in range(6):
            feed_all(stepper, {sequence: frame_of("lstm", rng) for sequence in sequences})
            copied = runner.states.copied
            assert copied == 6, i  # rounded up from 5, once


@given(st.lists(st.integers(0, 255), max_size=12), st.sampled_from(["lstm", "buffer"]))
def test_sequences_that_come_and_go_equal_each_alone(schedule: list[int], kind: str) -> None:
    """Bits of a number say which of some sequences step, the highest one that another begins
    instead of one."""
    rng = np.random.default_rng(len(schedule))
    stepper = STEPPERS.setdefault(kind, stepper_of(kind))
    streams = [(stepper.sequence(), StreamAlone(kind, STATES[kind])) for _ in range(7)]
    for bits in schedule:
        if bits & 128:
            sequence, _ = streams.pop(bits % len(streams))
            sequence.close()
            streams.append((stepper.sequence(), StreamAlone(kind, STATES[kind])))
        chosen = [stream for i, stream in enumerate(streams) if bits >> i & 1]
        frames = {sequence: frame_of(kind, rng) for sequence, _ in chosen}
        got = feed_all(stepper, frames)
        for sequence, alone in chosen:
            check(got[sequence], alone.step(frames[sequence]))
    for sequence, _ in streams:
        sequence.close()
    runner = stepper._engine.runner
    assert isinstance(runner, BatchedRunner)
    assert not runner._held
    assert not runner.states._batches


STEPPERS: dict[str, ps.Stepper] = {}


def test_many_threads_get_the_answers_of_each_alone() -> None:
    with stepper_of("buffer", max_sequences=3) as stepper:

        def client(seed: int) -> None:
            rng, alone = np.random.default_rng(seed), StreamAlone("buffer", STATES["buffer"])
            with stepper.sequence(priority=seed % 2) as sequence:
                for _ in range(20):
                    frame = frame_of("buffer", rng)
                    check(sequence.step(frame), alone.step(frame))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(client, range(8)))
        assert stepper.stats.rows == 160


def test_asynchronous_steps_are_those_of_each_alone() -> None:
    async def client(stepper: ps.Stepper, seed: int) -> None:
        rng, alone = np.random.default_rng(seed), StreamAlone("lstm", STATES["lstm"])
        with stepper.sequence() as sequence:
            for _ in range(10):
                frame = frame_of("lstm", rng)
                check(await sequence.astep(frame), alone.step(frame))

    async def main(stepper: ps.Stepper) -> None:
        await asyncio.gather(*[client(stepper, seed) for seed in range(6)])

    with stepper_of() as stepper:
        asyncio.run(main(stepper))
        assert stepper.stats.steps < 60


@pytest.mark.parametrize("kind", ["lstm", "dependent"])
def test_frames_behind_one_another_are_steps_of_one_sequence(kind: str) -> None:
    rng, alone = np.random.default_rng(0), StreamAlone(kind, STATES[kind])
    frames = frame_of(kind, rng, 5)
    want = [alone.step({"frame": frames["frame"][i : i + 1]}) for i in range(5)]
    with stepper_of(kind) as stepper:
        sequence = stepper.sequence()
        got = sequence.step(frames, wanted=3)
        for name, array in got.items():
            np.testing.assert_allclose(
                array, np.concatenate([y[name] for y in want[2:]]), rtol=0, atol=1e-5
            )
        assert sequence.length == 5
        assert stepper.stats.steps == 5


def test_fork_goes_on_by_itself() -> None:
    rng, kind = np.random.default_rng(0), "lstm"
    alone, other = StreamAlone(kind, STATES[kind]), StreamAlone(kind, STATES[kind])
    with stepper_of(kind) as stepper:
        sequence = stepper.sequence()
        frame = frame_of(kind, rng)
        sequence.step(frame)
        for stream in (alone, other):
            stream.step(frame)
        fork = sequence.fork()
        assert fork.length == 1
        streams = {sequence: alone, fork: other}
        for _ in range(3):
            frames = {one: frame_of(kind, rng) for one in streams}
            for one, got in feed_all(stepper, frames).items():
                check(got, streams[one].step(frames[one]))


def test_cut_begins_anew_and_refuses_frames_between() -> None:
    rng, kind = np.random.default_rng(0), "lstm"
    with stepper_of(kind) as stepper:
        sequence = stepper.sequence()
        sequence.step(frame_of(kind, rng, 3))
        with pytest.raises(ps.InvalidInput, match="states of earlier frames are not kept"):
            sequence.cut(2)
        assert sequence.length == 3
        sequence.cut(3)
        sequence.cut(0)
        frame = frame_of(kind, rng)
        check(sequence.step(frame), StreamAlone(kind, STATES[kind]).step(frame))
        assert sequence.length == 1


def test_sequence_begins_with_the_states_that_are_given() -> None:
    rng, kind = np.random.default_rng(0), "lstm"
    h0 = rng.standard_normal((1, 1, UNITS)).astype(np.float32)
    with stepper_of(kind) as stepper:
        streams = {
            stepper.sequence(initial={"h0": h0}): StreamAlone(kind, STATES[kind], h0=h0),
            stepper.sequence(): StreamAlone(kind, STATES[kind]),
        }
        for _ in range(2):
            frames = {one: frame_of(kind, rng) for one in streams}
            for one, got in feed_all(stepper, frames).items():
                check(got, streams[one].step(frames[one]))
        with pytest.raises(ps.InvalidInput, match="states are"):
            stepper.sequence(initial={"x": h0})
        with pytest.raises(ps.InvalidInput, match="of one sample"):
            stepper.sequence(initial={"h0": h0[0]})
    with ps.Stepper(ps.load(decoder_model("spelled"))) as stepper:
        assert stepper.state == {}
        with pytest.raises(ps.InvalidInput, match="no states of fixed size"):
            stepper.sequence(initial={"h0": h0})


SCALED = """g (float[b, 4] frame, float[b, 4] h) => (float[b, 4] y, float[b, 4] hn) {
    sum = Add (h, frame) q, s, z = DynamicQuantizeLinear (sum)
    hn = DequantizeLinear (q, s, z) y = Relu (hn) }"""


@pytest.mark.parametrize("batch", ["b", "1"])
def test_operation_without_a_form_for_samples_runs_one_sequence_at_a_time(batch: str) -> None:
    model = model_from_text(SCALED.replace("[b,", f"[{batch},"))
    runtime, rng = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(2)
    with ps.Stepper(model, state={"h": "hn"}) as stepper:
        assert stepper.reason is not None
        why = "depend on one another" if batch == "b" else "no open dim"
        assert re.search(f"{why}.*; DynamicQuantizeLinear.* one sample at a time", stepper.reason)
        streams = {stepper.sequence(): np.zeros((1, 4), np.float32) for _ in range(3)}
        for _ in range(3):
            frames = {s: {"frame": rng.standard_normal((1, 4), np.float32)} for s in streams}
            for sequence, got in feed_all(stepper, frames).items():
                y, after = runtime.run(None, {**frames[sequence], "h": streams[sequence]})
                streams[sequence] = after
                check(got, {"y": y})
        assert stepper.stats.steps == 9


def test_limit_of_the_largest_number_of_all_samples_is_found() -> None:
    """It shows only where one sample has larger numbers than usual; each sample gets its own."""
    text = """g (float[b, 4] frame, float[b, 4] h) => (float[b, 4] y, float[b, 4] hn)
        <float limit = {20}> {
        top = ReduceMax <keepdims = 0> (frame) large = Greater (top, limit)
        sum = Add (h, frame) hn = Where (large, frame, sum) y = Relu (hn) }"""
    with ps.Stepper(model_from_text(text), state={"h": "hn"}) as stepper:
        assert stepper._engine.runner._stacked is not None
        first, second = stepper.sequence(), stepper.sequence()
        small, large = np.ones((1, 4), np.float32), np.full((1, 4), 30, np.float32)
        for _ in range(2):
            frames = {first: {"frame": small}, second: {"frame": large}}
            results = feed_all(stepper, frames)
        check(results[first], {"y": 2 * small})
        check(results[second], {"y": large})


def test_states_of_all_sequences_are_bounded() -> None:
    with stepper_of(cache_bytes=2 * 2 * 4 * UNITS) as stepper:
        rng = np.random.default_rng(0)
        first, second = stepper.sequence(), stepper.sequence()
        for sequence in (first, second):
            sequence.step(frame_of("lstm", rng))
        with pytest.raises(ps.LimitExceeded, match="cache_bytes"):
            first.fork()
        with pytest.raises(ps.LimitExceeded, match="cache_bytes"):
            stepper.sequence().step(frame_of("lstm", rng))
        first.close()
        stepper.sequence().step(frame_of("lstm", rng))


def test_frame_that_the_model_does_not_take_is_an_error_of_its_sequence_alone() -> None:
    rng, kind = np.random.default_rng(0), "buffer"
    with stepper_of(kind) as stepper:
        bad, good, ends = stepper.sequence(), stepper.sequence(), {}
        wrong = frame_of(kind, rng) | {"audio": np.zeros((1, WIDTH + 1, 2), np.float32)}
        frame = frame_of(kind, rng)
        for one, feeds in ((bad, wrong), (good, frame)):
            one.feed(feeds, 1, lambda y, e, s=one: ends.update({s: (y, e)}))
        while stepper._engine.step():
            pass
        assert isinstance(ends[bad][1], ps.PenstockError)
        check(ends[good][0], StreamAlone(kind, STATES[kind]).step(frame))
        assert bad.length == 0
        check(bad.step(frame), StreamAlone(kind, STATES[kind]).step(frame))
        assert stepper.reason is None


def test_several_sequences_go_on_beside_one_that_fails() -> None:
    text = """g (float[b, 4] frame, int64[b, 1] place, float[b, 4] h) => (float[b, 1] y, float[b, 4] hn) {
        hn = Add (h, frame) y = GatherElements <axis = 1> (hn, place) }"""
    with ps.Stepper(model_from_text(text), state={"h": "hn"}) as stepper:
        sequences = [stepper.sequence() for _ in range(4)]
        for count in (1, 2):
            ends: list[tuple[int, tuple]] = []
            for i, sequence in enumerate(sequences):
                place = np.array([[9 if i == 1 and count == 2 else i]])
                frame = {"frame": np.full((1, 4), i, np.float32), "place": place}
                sequence.feed(frame, 1, lambda y, e, i=i, ends=ends: ends.append((i, (y, e))))
            while stepper._engine.step():
                pass
            results = dict(ends)
            assert [i for i, (_, error) in results.items() if error] == [1] * (count - 1)
            for i in (0, 2, 3):
                check(results[i][0], {"y": np.full((1, 1), count * i, np.float32)})


def test_deadline_leaves_the_sequence_as_it_was() -> None:
    rng, kind = np.random.default_rng(0), "lstm"
    with stepper_of(kind) as stepper:
        sequence, alone = stepper.sequence(), StreamAlone(kind, STATES[kind])
        first, frame = frame_of(kind, rng), frame_of(kind, rng)
        check(sequence.step(first), alone.step(first))
        with pytest.raises(ps.DeadlineExceeded):
            sequence.step(frame_of(kind, rng), timeout=0)
        assert sequence.length == 1
        check(sequence.step(frame), alone.step(frame))


def test_written_outputs_are_no_states_of_others() -> None:
    """An output may be the state itself."""
    text = """g (float[b, 2] x, float[b, 2] s) => (float[b, 2] y, float[b, 2] s_out) {
        s_out = Add (x, s) y = Identity (s_out) }"""
    with ps.Stepper(ps.load(model_from_text(text))) as stepper:
        sequence, x = stepper.sequence(), np.ones((1, 2), np.float32)
        sequence.step({"x": x})["y"][:] = 50
        assert sequence.step({"x": x})["y"].tolist() == [[2, 2]]


def test_model_without_state_is_stepped_if_that_is_said() -> None:
    text = f"g (float[b, {WIDTH}] x) => (float[b, {WIDTH}] y) {{ y = Neg (x) }}"
    model = ps.load(model_from_text(text))
    with pytest.raises(ps.InvalidInput, match="no state that is fed back"):
        ps.Stepper(model)
    with ps.Stepper(model, state={}) as stepper:
        x = np.ones((3, WIDTH), np.float32)
        np.testing.assert_array_equal(stepper.sequence().step({"x": x}, wanted=2)["y"], -x[:2])


def test_caches_that_grow_beside_states_of_fixed_size_are_refused() -> None:
    text = """g (float[b, s, 4] x, float[b, 1, p, 4] past_k, float[b, 4] h) => (float[b, s, 4] y,
        float[b, 1, t, 4] present_k, float[b, 4] h_out) <int64[1] one = {1}> {
        r = Unsqueeze (x, one) present_k = Concat <axis = 2> (past_k, r) y = Neg (x)
        h_out = Neg (h) }"""
    with ps.Stepper(ps.load(model_from_text(text))) as stepper:
        assert stepper.state == {"past_k": "present_k", "h": "h_out"}
        with pytest.raises(ps.InvalidInput, match="Caches that grow"):
            stepper.sequence()
        sequence = stepper.sequence(initial={"past_k": np.zeros((1, 1, 2, 4), np.float32)})
        with pytest.raises(ps.InvalidInput, match="came back as"):
            sequence.step({"x": np.ones((1, 3, 4), np.float32)})


def test_state_of_open_dims_has_the_size_that_is_given() -> None:
    kind, rng = "buffer", np.random.default_rng(0)
    model = stream_model(kind)
    text = type(model)()
    text.CopyFrom(model)
    for value in (*text.graph.input, *text.graph.output):
        if "cache" in value.name:
            value.type.tensor_type.shape.dim[2].dim_param = "past"
    with ps.Stepper(ps.load(text)) as stepper:
        zeros = np.zeros((1, WIDTH, PAST), np.float32)
        streams = {
            stepper.sequence(initial={"audio_cache_in": zeros}): StreamAlone(kind, STATES[kind])
            for _ in range(3)
        }
        for _ in range(2):
            frames = {one: frame_of(kind, rng) for one in streams}
            for one, got in feed_all(stepper, frames).items():
                check(got, streams[one].step(frames[one]))


def test_model_of_one_frame_a_call_takes_no_other_shapes() -> None:
    with stepper_of("static") as stepper:
        with pytest.raises(ps.PenstockError):
            stepper.sequence().step(frame_of("static", np.random.default_rng(0), 2))
        with pytest.raises(
            ps.InvalidInput, match=r"cannot step .audio.: the model has no such value"
        ):
            stepper.sequence().step({"audio": np.zeros(3)})


@pytest.mark.parametrize("name", MODELS)
def test_each_sequence_has_variables_of_its_own(name: str) -> None:
    stepper = ps.Stepper(ps.load(MODELS[name]()))
    assert stepper.state == {"sum": "sum/next"}
    assert (stepper.reason is None) == (name != "branching")  # its condition is no one's alone
    streams = {stepper.sequence(): frames_of(name, seed, 5) for seed in range(4)}
    wanted = {sequence: by_litert(name, frames) for sequence, frames in streams.items()}
    for i in range(5):
        results = feed_all(stepper, {sequence: frames[i] for sequence, frames in streams.items()})
        for sequence, outputs in results.items():
            check(outputs, {"y": wanted[sequence][i]})


def test_variables_begin_with_what_a_sequence_is_given() -> None:
    stepper = ps.Stepper(ps.load(MODELS["summing"]()))
    (frame,) = frames_of("summing", 0, 1)
    with stepper.sequence(initial={"sum": np.zeros((1, 3), np.float32)}) as sequence:
        check(sequence.step(frame), {"y": np.tanh(frame["x"])})
