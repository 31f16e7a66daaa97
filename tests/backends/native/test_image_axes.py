"""The elements that taps read along an axis, against the definitions of Conv and ConvTranspose."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.backends.native.image_axes import PADDING, SeenAxis, spans
from tests.support.native_kernels import node_of

SIZES = [*product((1, 2, 7, 12), (1, 2, 3), (1, 2, 3), (1, 2), (0, 1))]


def axis_of(op: str, size: int, kernel: int, stride: int, dilation: int, pad: int) -> SeenAxis:
    x, w = np.zeros((1, 2, size), np.float32), np.zeros((2, 2, kernel), np.float32)
    node = node_of(op, [x, w], strides=[stride], dilations=[dilation], pads=[pad, pad])
    (axis,) = spans(node, [kernel], [size]) or [None]
    assert axis is not None
    return axis


@pytest.mark.parametrize(("size", "kernel", "stride", "dilation", "pad"), SIZES)
def test_position_of_a_convolution_reads_its_window(size, kernel, stride, dilation, pad):
    if size + 2 * pad < (kernel - 1) * dilation + 1:
        pytest.skip("the window is larger than the padded image")
    axis = axis_of("Conv", size, kernel, stride, dilation, pad)
    windows = [
        [o * stride - pad + k * dilation for k in range(kernel)] for o in range(axis.results)
    ]
    (seen,) = axis.seen
    assert windows == [[at + o * axis.stride for at in seen] for o in range(axis.results)]
    partial = [w for w in windows if w[0] < 0 or w[-1] >= size]
    assert axis.inside == (not partial)
    assert axis.ends == len(partial) or axis.results < axis.ends  # a position may cross both ends
    assert axis.adjacent == (dilation == 1 or kernel == 1)
    assert axis.reach == (kernel - 1) * dilation + 1


@pytest.mark.parametrize(("size", "kernel", "stride", "dilation", "pad"), SIZES)
def test_phases_of_a_transposed_convolution_read_what_is_added_to_them(
    size, kernel, stride, dilation, pad
):
    results = (size - 1) * stride + (kernel - 1) * dilation + 1 - 2 * pad
    if results < 1:
        pytest.skip("there are no results")
    axis = axis_of("ConvTranspose", size, kernel, stride, dilation, pad)
    assert axis.results == results
    for at in range(results):
        phase, position = at % len(axis.taps), at // len(axis.taps)
        taps, seen = axis.taps[phase], axis.seen[phase]
        read = {
            (k, i + position * axis.stride)
            for k, i in zip(taps, seen, strict=True)
            if taps != PADDING and 0 <= i + position * axis.stride < size
        }
        added = product(range(kernel), range(size))
        assert read == {(k, i) for k, i in added if i * stride + k * dilation - pad == at}
