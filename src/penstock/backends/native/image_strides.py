"""Calls of kernels that take images of any strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from penstock.backends.native.dense import NO_PROGRAM
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.core.records import replace
from penstock.core.traced import int64s
from penstock.ir.layout import channels_last, strides_of

AXES = 3
"""spatial axes of an image for compiled code, as in c/windows/image_convolution.c"""

WINDOW = attrgetter("size", "count", "kernel", "stride", "dilation", "begin")
"""the numbers of a ``Window`` for compiled code"""


def of_any_strides(
    site: Site,
    call: NativeCall,
    images: Sequence[int | None],
    copying: Callable[[], NativeCall | None] | None = None,
    *,
    turned: bool = False,
    first: int | None = None,
) -> NativeCall:
    """Return a call for any strides of the ``images``, which are its last words: ``call`` if all
    are channels last, and the columns of the first contiguous, else the call of ``copying``, if
    given. ``turned``: rows and columns are swapped. ``first``, if not None: the kernel takes a
    program of the parts from there on, 0 for none. Raises ``UnsupportedError``."""
    output = site.output().dims
    order = channels_last(len(output))
    tensors = [word for word in call.words if isinstance(word, Tensor)]
    # Weights and bias given at run time, and other operands of kernels without programs.
    dense = {t.index for t in tensors if t.own_order or (first is None and t.index not in images)}
    behind = None
    if first:
        from penstock.backends.native.elementwise import program_behind

        behind = program_behind(site, first)
    # A single cell of the closure, as the garbage collector traverses each.
    programs = first is not None, behind

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        if any(strides[i] for i in dense):
            raise UnsupportedError  # they must be contiguous
        steps: list[tuple[int, ...] | None] = []
        for i in images:
            type_ = None if i is None else site.tensors[i]
            own = None if i is None or type_ is None else steps_of(type_.dims, strides[i], turned)
            steps.append(own)
        # Kernels that support any layout copy the result to its place.
        read = steps[:1] if call.any_layout else steps
        innermost = False not in [own is None or own[1] == 1 for own in read]
        x = site.tensors[images[0] or 0]
        gaps = steps[0] is None or x is None or steps[0][3] != x.dims[1]
        chosen = call
        if copying is not None and (gaps or not innermost):
            chosen = copying() or call
        takes_program, behind = programs
        words = (*chosen.words[: -len(images)], *int64s(*steps))
        if behind is None:
            return replace(chosen, words=(*words, 0, *NO_PROGRAM) if takes_program else words)
        last = steps_of(output, strides_of(output, 1, order), turned)
        # Rows of filters, or of the positions of a filter.
        rows = 1 if steps[-1] is not None and steps[-1] == last else 2
        if rows == 2 and strides[len(site.node.inputs)] is not None:
            raise UnsupportedError
        row = output[1] if rows == 1 else math.prod(output[2:])
        return _with_program(replace(chosen, words=words), rows, behind(row, strides))

    plain = call
    if behind is not None:  # its program reads further tensors
        added = behind(math.prod(output[2:]), [None] * len(site.tensors))
        plain = _with_program(call, 2, added)
    return replace(plain, restrided=restrided, dims_order=order)


def _with_program(call: NativeCall, rows: int, added: NativeCall) -> NativeCall:
    """Return a call with the program of ``added`` behind it."""
    ns = call.item_ns + added.item_ns * added.items / call.items
    return replace(call, words=(*call.words, rows, *added.words), item_ns=ns)


def steps_of(dims: Sequence[int], strides: Sequence[int] | None, turned: bool) -> tuple[int, ...]:
    """Return the strides of an image for compiled code. Those along dims of 1, which are arbitrary,
    are set to the channels-last ones."""
    image, channel, *spatial = strides or strides_of(tuple(dims), 1)
    channel = 1 if dims[1] == 1 else channel
    inner = channel * dims[1]
    for i in range(len(spatial) - 1, -1, -1):
        spatial[i] = inner if dims[2 + i] == 1 else spatial[i]
        inner = spatial[i] * dims[2 + i]
    image = inner if dims[0] == 1 else image
    *slices, rows, columns = [inner] * (AXES - len(spatial)) + list(spatial)
    rows, columns = (columns, rows) if turned else (rows, columns)
    return image, channel, rows, columns, *slices
