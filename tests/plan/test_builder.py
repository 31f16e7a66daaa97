"""Steps and memory of a plan: views, operands that are overwritten, copies."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.plan.plan import SlotKind
from tests.plan.test_plan import planned, slot
from tests.support.onnx_text import compile_text, model_from_text


def test_views_of_planned_memory_are_no_steps():
    #  x -> Exp -> t -> Reshape -> Transpose -> Slice -> Neg
    plan, arena_plan = planned(
        """g (float[4, 6] x) => (float[M, N] y) <int64[2] s = {6, 4}, int64[1] a = {1},
            int64[1] b = {3}> {
            t = Exp(x) u = Reshape(t, s) v = Transpose(u) w = Slice(v, a, b) y = Neg(w) }"""
    )
    assert [step.node.op.name for step in plan.steps] == ["Exp", "Neg"]
    assert plan.views == 3
    seen = plan.slots[slot(plan, "w")]
    assert seen.kind is SlotKind.ALIAS
    assert seen.base == slot(plan, "t")
    # u is [6, 4], its transpose has strides (4, 16); the slice starts in row 1.
    assert (seen.offset, seen.strides) == (4, (4, 16))
    assert arena_plan.size == 4 * 6 * 4


def test_a_view_keeps_the_memory_it_looks_at_alive():
    #  a -> transpose -> (read at the very end), while others read a and are done
    plan, arena_plan = planned(
        """g (float[8, 8] x) => (float[8, 8] y) {
            a = Exp(x) v = Transpose(a) b = Sin(a) c = MatMul(b, b) y = Add(c, v) }"""
    )
    buffers = arena_plan.buffer_of
    a, b = slot(plan, "a"), slot(plan, "b")
    assert buffers[a] != buffers[b]
    assert abs(arena_plan.offsets[a] - arena_plan.offsets[b]) >= 256


def test_a_reshape_that_strides_cannot_express_copies():
    plan, _ = planned(
        """g (float[4, 6] x) => (float[24] y) <int64[1] s = {-1}> {
            t = Exp(x) v = Transpose(t) w = Reshape(v, s) y = Neg(w) }"""
    )
    assert [step.node.op.name for step in plan.steps] == ["Exp", "Reshape", "Neg"]


def test_a_view_of_an_input_or_a_constant_is_never_written():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    session = compile_text(
        """g (float[2, 3] x) => (float[3, 2] y) { t = Transpose(x) u = Neg(t) y = Exp(u) }"""
    )
    session.run({"x": x})
    np.testing.assert_array_equal(x, np.arange(6).reshape(2, 3))


def test_plan_overwrites_no_operand_that_is_read_later():
    #  a -> b = -a -> c = a + b: b may not take a's memory
    plan, arena_plan = planned(
        "g (float[16] x) => (float[16] y) { a = Exp(x) b = Sin(a) c = Mul(a, b) d = Sub(c, a) y = Neg(d) }"
    )
    of = arena_plan.buffer_of
    a, b, c, d = (slot(plan, name) for name in "abcd")
    assert of[a] != of[b]
    assert of[b] == of[c]  # b dies in c
    assert of[d] in (of[a], of[c])


def test_plan_overwrites_no_operand_that_a_view_still_reads():
    plan, arena_plan = planned(
        """g (float[4, 4] x) => (float[4, 4] y) {
            a = Exp(x) v = Transpose(a) b = Neg(a) c = Add(b, v) y = Sin(c) }"""
    )
    assert arena_plan.buffer_of[slot(plan, "a")] != arena_plan.buffer_of[slot(plan, "b")]


def test_plan_overwrites_no_operand_that_is_read_by_two_views():
    #  a + transpose(a): in place, later elements would read what earlier ones wrote
    plan, arena_plan = planned(
        "g (float[4, 4] x) => (float[4, 4] y) { a = Exp(x) v = Transpose(a) b = Add(a, v) y = Sin(b) }"
    )
    assert arena_plan.buffer_of[slot(plan, "a")] != arena_plan.buffer_of[slot(plan, "b")]


@pytest.mark.parametrize(
    "body", ["b = Sum(a, z, a)", "b = RMSNormalization(a, a)", "b = Add(a, a)"]
)
def test_a_value_that_is_read_twice_is_overwritten_only_by_kernels_that_allow_it(body):
    #  a + z + a: after a + z is written over a, there is no a left to add
    model = model_from_text(
        f"g (float[4] x, float[4] z) => (float[4] y) {{ a = Neg(x) {body} y = Sin(b) }}", opset=23
    )
    x, z = np.arange(1, 5, dtype=np.float32), np.full(4, 10, np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x, "z": z})
    np.testing.assert_allclose(ps.compile(model)(x, z), want, rtol=1e-5)


def test_a_broadcast_operand_is_not_taken_over():
    plan, arena_plan = planned(
        """g (float[4, 4] x) => (float[4, 4] y) <int64[1] n = {0}> {
            a = Exp(x) r = ReduceMax <keepdims = 1> (a, n) b = Add(r, a) y = Sin(b) }"""
    )
    of = arena_plan.buffer_of
    assert of[slot(plan, "b")] == of[slot(plan, "a")] != of[slot(plan, "r")]


@pytest.mark.parametrize(
    ("update", "direct"),
    [
        ("w = Add(v, x)", True),
        # A view of what the body computes lies elsewhere, and is copied into the buffer;
        ("t = Add(v, x) w = Slice(t, last, far, axis, back)", False),
        # one that strides cannot express is copied anyway, straight into it.
        ("t = Reshape(v, two) s = Exp(t) r = Transpose(s) w = Reshape(r, six)", True),
        ("t = Add(v, x) w = Identity(x)", False),
    ],
)
def test_loop_update_is_written_into_the_free_buffer(update, direct):
    plan, _ = planned(
        f"""g (float[6] x, int64 n) => (float[6] y) <int64[2] two = {{2, 3}}, int64[1] six = {{6}},
            int64[1] last = {{5}}, int64[1] far = {{-9}}, int64[1] axis = {{0}}, int64[1] back = {{-1}}> {{
            y = Loop (n, , x) <body = b (int64 i, bool c, float[6] v) => (bool d, float[6] w)
                {{ d = Identity(c) {update} }}> }}"""
    )
    (loop,) = plan.steps
    assert [carry.direct for carry in loop.carries] == [direct]


def test_loop_copies_one_of_two_carried_values_with_one_update():
    plan, _ = planned(
        """g (float[4] x, int64 n) => (float[4] y, float[4] z) {
            y, z = Loop (n, , x, x) <body = b (int64 i, bool c, float[4] v, float[4] u)
                => (bool d, float[4] w, float[4] w) { d = Identity(c) w = Add(v, u) }> }"""
    )
    (loop,) = plan.steps
    assert [carry.direct for carry in loop.carries] == [True, False]
    assert not {*loop.carries[0].buffers} & {*loop.carries[1].buffers}


def test_a_sequence_gets_copies_of_what_is_planned_and_of_nothing_else():
    plan, _ = planned(
        """g (float[4] x) => (seq(float[4]) s) <float[4] k = {1, 2, 3, 4}> {
            a = Exp(x) s = SequenceConstruct(a, x, k) }"""
    )
    (construct,) = [step for step in plan.steps if step.node.op.name == "SequenceConstruct"]
    assert construct.copied == (0,)
