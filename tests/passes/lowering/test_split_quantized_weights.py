"""Convolutions with weights of codes that int8 does not hold."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.backends.native.forced import compile_on_native
from tests.backends.native.quantized_nets import (
    F32,
    I32,
    U8,
    Net,
    agree,
    codes,
    restart_rng,
    steps,
)
from tests.support.native_kernels import pytestmark as needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("same_numbers")]
DIMS = {1: (20, 6, 3, 3), 6: (12, 1, 3, 3)}
"""of filters, by groups"""


@pytest.fixture
def same_numbers():
    restart_rng()


def _integer(group: int, zero: np.ndarray) -> tuple[Net, str]:
    net = Net()
    x = net.feed(codes(U8, 2, 6, 9, 8))
    given = [x, net.constant(codes(U8, *DIMS[group])), net.constant(U8(117)), net.constant(zero)]
    product = net.add("ConvInteger", given, group=group, pads=[1, 1, 1, 1])
    number = net.add("Cast", [product], to=1)
    return net, net.add("Mul", [number, net.constant(0.03, F32)])


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("zero", [121, 140, "by filter"])
def test_integer_convolution_of_wide_weights_runs_on_native_with_the_same_sums(zero, group):
    filters = DIMS[group][0]
    points = codes(U8, filters) // 2 + 60 if zero == "by filter" else np.array(zero, U8)
    net, result = _integer(group, points.astype(U8))
    session = compile_on_native(net.proto(result))
    want = ps.compile(net.proto(result), backends=["numpy"]).run(net.feeds)[result]
    np.testing.assert_array_equal(session.run(net.feeds)[result], want)
    assert {backend for ops, backend in steps(session) if "ConvInteger" in ops} == {"native"}


def test_integer_convolution_of_weights_that_int8_holds_is_left_as_it_is():
    net, result = _integer(1, np.array(128, U8))
    session = compile_on_native(net.proto(result))
    session.run(net.feeds)
    assert [ops for ops, _ in steps(session)] == ["ConvInteger Cast Mul"]


def test_integer_convolution_whose_integers_are_the_result_is_left_as_it_is():
    net = Net()
    given = [net.feed(codes(U8, 2, 6, 9, 8)), net.constant(codes(U8, *DIMS[1]))]
    product = net.add("ConvInteger", [*given, net.constant(U8(117)), net.constant(U8(121))])
    session = ps.compile(net.proto(product))
    session.run(net.feeds)
    assert [ops for ops, _ in steps(session)] == ["ConvInteger"]


def test_weights_farther_from_their_zero_point_than_two_codes_reach_stay_on_numpy():
    net, result = _integer(1, np.array(0, U8))
    agree(net.proto(result), net.feeds, None, reference=False)
    session = compile_on_native(net.proto(result))
    session.run(net.feeds)
    assert ("ConvInteger", "numpy") in steps(session)


def test_qlinear_convolution_of_wide_weights_runs_on_library():
    net = Net()
    given = [net.feed(codes(U8, 2, 6, 9, 8)), net.constant(0.02, F32), net.constant(U8(99))]
    given += [net.constant(codes(U8, *DIMS[1])), net.constant(0.01, F32), net.constant(U8(111))]
    given += [net.constant(0.5, F32), net.constant(U8(120))]
    given += [net.constant(np.arange(20) * 99, I32)]
    result = net.add("QLinearConv", given)
    ran = [("Concat", "numpy"), ("QLinearConv", "native")]
    agree(net.proto(result), net.feeds, ran, reference=False)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("zero", [0, 121, "by filter"])
def test_qlinear_convolution_in_groups_of_wide_weights_is_one_of_real_numbers(zero, biased):
    points = codes(U8, 12) // 2 + 60 if zero == "by filter" else np.array(zero)
    net = Net()
    given = [net.feed(codes(U8, 2, 6, 9, 8)), net.constant(0.02, F32), net.constant(U8(99))]
    given += [net.constant(codes(U8, *DIMS[6])), net.constant(np.full(points.shape, 0.01), F32)]
    given += [net.constant(points.astype(U8)), net.constant(0.5, F32), net.constant(U8(120))]
    given += [net.constant(np.arange(12) * 99, I32)] * biased
    result = net.add("QLinearConv", given, group=6, pads=[1, 1, 1, 1])
    want = ps.compile(net.proto(result), executor="interpret").run(net.feeds)[result]
    session = ps.compile(net.proto(result))
    np.testing.assert_array_equal(session.run(net.feeds)[result], want)
    ran = steps(session)
    assert any("Conv" in ops.split() for ops, _ in ran)
    assert "numpy" not in {backend for _, backend in ran}


@pytest.mark.parametrize("by_filter", [True, False])
def test_convolution_between_conversions_of_wide_weights_runs_on_native(by_filter):
    net = Net()
    x = net.dequantize(net.feed(codes(U8, 2, 6, 9, 8)), 0.02, U8(99))
    points = codes(U8, 20) // 2 + 60 if by_filter else np.array(111)
    scales = np.full(points.shape, 0.01)
    w = net.dequantize(net.constant(codes(U8, *DIMS[1])), scales, points.astype(U8), axis=0)
    bias = net.dequantize(net.constant(np.arange(20) * 99, I32), scales * 0.02, axis=0)
    result = net.quantize(net.add("Conv", [x, w, bias]), 0.5, U8(120))
    ran = [("Concat", "numpy"), ("Conv QuantizeLinear", "native")]
    agree(net.proto(result), net.feeds, ran, reference=False)
