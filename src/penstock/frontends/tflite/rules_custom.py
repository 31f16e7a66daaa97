"""Custom operators: operations of the domain "tflite" with their names.

A custom operator NAME becomes the operation NAME of that domain, if there is one, with its options
as attributes. To load a model with custom operators, register these as operations::

    @penstock.ops.operator("MyOperator", domain="tflite")
    def my_operator(node, types): ...
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32
from penstock.frontends.common.diagnostics import NO_KERNEL, InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW, TFLITE, find

_LEAST_TOLERANCE = 0.1  # below, LiteRT's NumericVerify never fails
_FLEX = "Flex"
"""with which the names of TensorFlow's operations in TFLite files begin"""


def custom(c: OperatorConversion) -> None:
    """Options are a FlexBuffer with a map, or other bytes, which become the attribute
    ``options``."""
    name = c.op.removeprefix("CUSTOM:")
    if find(name, TFLITE) is None:
        if name.startswith(_FLEX):
            raise InexpressibleError(
                f"it is TensorFlow's {name.removeprefix(_FLEX)}, which the converter kept since "
                "SELECT_TF_OPS allowed it; load the SavedModel from which the file was converted"
            )
        raise InexpressibleError(f"{NO_KERNEL}; register one with penstock.ops.operator")
    options = c.context.custom_options(c.operator)
    attrs = options_of(options)
    c.emit_final(name, attrs={"options": options} if attrs is None else attrs, domain=TFLITE)


def options_of(options: bytes) -> AttrDict | None:
    """Return the map of a FlexBuffer, or None for other bytes."""
    attrs: object = {}
    with suppress(ValueError):
        attrs = decode(options) if options else {}
    return attrs if isinstance(attrs, dict) else None


@operator_rule("CUSTOM:NumericVerify")
def numeric_verify(c: OperatorConversion) -> None:
    """LiteRT's operator in models for debugging: the differences of a tensor's real numbers from
    those it was computed from. It fails beyond ``tolerance`` quanta if the options say so."""
    options = options_of(c.context.custom_options(c.operator)) or {}
    tolerance, quantization = options.get("tolerance", 0.0), c.quantizations[0]
    if not isinstance(tolerance, int | float):
        raise InexpressibleError(f"its tolerance is {tolerance!r}, which is no number")
    attrs = {}
    if options.get("log_if_failed") and tolerance >= _LEAST_TOLERANCE:
        attrs["most"] = tolerance * (quantization.scales[0] if quantization else 0.0)
    c.emit_final("NumericVerify", c.take(2), attrs, domain=TFLITE)


# FlexBuffers, the format of the options of custom operators: values that contain their types.
#
# The root is at the end: ``[...] [root] [type of the root] [bytes of the root]``. A type is a
# number whose two lowest bits are the width of elements; offsets count backwards from their own
# positions.


_NULL, _INT, _UINT, _FLOAT, _KEY, _STRING = range(6)
_MAP, _VECTOR, _BLOB, _BOOL = 9, 10, 25, 26
_TYPED = {11: _INT, 12: _UINT, 13: _FLOAT, 14: _KEY, 15: _STRING, 36: _BOOL}
_INDIRECT = {6: _INT, 7: _UINT, 8: _FLOAT}
# The bound for all vectors together: offsets refer to them, so that a few bytes could name one
# vector many times.
_MAX_VALUES = 100_000
_MAX_DEPTH = 32


def decode(data: bytes) -> Any:
    """Return the value of a FlexBuffer: numbers, texts, lists, dicts. Raises ``ValueError``."""
    if len(data) < 3:
        raise ValueError("they are too short")
    width = data[-1]
    return _Decoder(data).value(len(data) - 2 - width, width, data[-2], 0)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.left = _MAX_VALUES

    def number(self, at: int, width: int, kind: int = _UINT) -> Any:
        codes = {_INT: "bhiq", _FLOAT: "?efd"}.get(kind, "BHIQ")
        if width not in (1, 2, 4, 8) or at < 0 or at + width > len(self.data):
            raise ValueError("an offset leads out of them")
        return struct.unpack_from(f"<{codes[width.bit_length() - 1]}", self.data, at)[0]

    def target(self, at: int, width: int) -> int:
        return at - int(self.number(at, width))

    def text(self, at: int, size: int | None = None) -> str:
        end = self.data.find(b"\0", max(at, 0)) if size is None else at + size
        if at < 0 or not at <= end <= len(self.data):
            raise ValueError("a text has no end")
        return self.data[at:end].decode("utf-8", "replace")

    def value(self, at: int, width: int, packed: int, depth: int) -> Any:
        """Return the value at ``at``, whose type and element width are in ``packed``."""
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise ValueError("they nest too deep, or are too large")
        kind, inner = packed >> 2, 1 << (packed & 3)
        if kind in (_NULL, _BOOL):
            return None if kind == _NULL else bool(self.number(at, width))
        if kind in (_INT, _UINT, _FLOAT):
            return self.number(at, width, kind)
        at = self.target(at, width)
        if kind in _INDIRECT:
            return self.number(at, inner, _INDIRECT[kind])
        if kind == _KEY:
            return self.text(at)
        size = int(self.number(at - inner, inner))
        if kind in (_STRING, _BLOB):
            return self.text(at, size)
        if size * inner > len(self.data):
            raise ValueError("a vector leads out of them")
        if kind in _TYPED:
            packed = _TYPED[kind] << 2 | 0
            return [self.value(at + i * inner, inner, packed, depth + 1) for i in range(size)]
        if kind not in (_MAP, _VECTOR):
            raise ValueError(f"type {kind} is not supported")
        types = at + size * inner
        values = [
            self.value(at + i * inner, inner, self.number(types + i, 1), depth + 1)
            for i in range(size)
        ]
        if kind == _VECTOR:
            return values
        # A map is preceded by the offset of its keys, their width, and its size.
        keys = self.target(at - 3 * inner, inner)
        key_width = int(self.number(at - 2 * inner, inner))
        texts = [self.text(self.target(keys + i * key_width, key_width)) for i in range(size)]
        return dict(zip(texts, values, strict=True))


# Boxes of objects from a network's outputs for anchors: the custom operator
# TFLite_Detection_PostProcess, as operations of ONNX and TensorFlow.


_COUNTS = ("max_detections", "max_classes_per_detection", "num_classes")
_NUMBERS = ("y_scale", "x_scale", "h_scale", "w_scale", "nms_score_threshold", "nms_iou_threshold")
_MOST = 2**20  # results


class _Options:
    """The options. Results are tables of ``rows`` and ``columns``: of the ``most`` boxes with their
    best classes, or of a box and a class."""

    def __init__(self, c: OperatorConversion) -> None:
        given = options_of(c.context.custom_options(c.operator)) or {}

        def number(name: str, default: float | None = None) -> float:
            value = given.get(name, default)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise NodeError(f"has {value!r} as {name}, which must be a number")
            return value

        self.most, self.number, self.classes = (int(number(name)) for name in _COUNTS)
        counts = (self.most, self.number, self.classes, self.most * self.number)
        if not 1 <= min(counts) <= max(counts) < _MOST:
            raise NodeError(f"has {self.most} detections of up to {self.number} classes")
        *self.scales, least, overlap = (np.float32(number(name)) for name in _NUMBERS)
        # NonMaxSuppression takes scores above its threshold, LiteRT also those equal to it.
        limits = (overlap, np.nextafter(least, np.float32(-np.inf)))
        self.limits = [c.constant(limit, FLOAT32) for limit in limits]
        self.each_class = bool(given.get("use_regular_nms"))
        self.of_each_class = int(min(number("detections_per_class", 100), self.most))
        self.rows = self.most * (self.number if self.each_class else 1)
        self.columns = 1 if self.each_class else self.number


@operator_rule("CUSTOM:TFLite_Detection_PostProcess", outputs=4)
def detection(c: OperatorConversion) -> None:
    """Encoded boxes [1, N, 4], scores of classes [1, N, C], anchors [N, 4] as (y, x, h, w). Returns
    boxes (y0, x0, y1, x1), their classes, their scores, and their number. If there is one class
    more than ``num_classes``, the first is the background."""
    options, (encoded, scores, anchors) = _Options(c), c.take(3)
    *_, given = c.shape(1) or [None]
    if isinstance(given, int) and given - options.classes not in (0, 1):
        raise NodeError(f"has scores of {given} classes, but options of {options.classes}")
    boxes = _decoded(c, options, encoded, anchors)
    scores = c.emit("Squeeze", [c.emit("Slice", [scores, [-options.classes], [2**31], [2]]), [0]])
    find = _of_each_class if options.each_class else _of_any_class
    boxes, classes, scores, count = find(c, options, boxes, scores)
    # Zeros follow the boxes that were found.
    places = c.constant(np.arange(options.rows, dtype=np.int32)[:, None], INT32)
    is_valid, zero = c.emit("Less", [places, count]), c.constant(0, FLOAT32)
    if options.columns > 1:
        boxes = c.emit("Concat", [boxes] * options.columns, axis=1)
    for value, output, dims in (
        (boxes, c.outputs[0], [1, -1, 4]),
        (c.cast(classes, "float32"), c.outputs[1], [1, -1]),
        (scores, c.outputs[2], [1, -1]),
    ):
        kept = c.emit("Where", [is_valid, value, zero])
        if output is not None:
            c.append("Reshape", "", [kept, dims], [output], None, output.name)
    attrs = {"to": element_number("float32")}
    c.emit_final("Cast", [c.emit("Reshape", [count, [1]])], attrs, outputs=c.outputs[3:])


def _decoded(c: OperatorConversion, options: _Options, encoded: Value, anchors: Value) -> Value:
    """Return the corners of boxes [N, 4]."""
    encoded = c.emit("Squeeze", [c.emit("Slice", [encoded, [0], [4], [2]]), [0]])
    encoded = c.emit("Div", [encoded, c.constant(np.array(options.scales), FLOAT32)])
    offsets, sizes = c.emit_several("Split", [encoded], {"axis": 1, "num_outputs": 2}, count=2)
    places, extents = c.emit_several("Split", [anchors], {"axis": 1, "num_outputs": 2}, count=2)
    centres = c.emit("Add", [c.emit("Mul", [offsets, extents]), places])
    halves = c.emit("Mul", [c.emit("Exp", [sizes]), c.constant(0.5, FLOAT32)])
    halves = c.emit("Mul", [halves, extents])
    return c.emit("Concat", [c.emit(op, [centres, halves]) for op in ("Sub", "Add")], axis=1)


_Found = tuple[Value, Value, Value, Value]


def _of_any_class(c: OperatorConversion, options: _Options, boxes: Value, scores: Value) -> _Found:
    """Return boxes chosen by their highest score, each with its best classes."""
    best = c.emit("ReduceMax", [scores, [1]], keepdims=0)
    attrs, most = {"pad_to_max_output_size": True, "outputs": 2}, c.constant(options.most, INT32)
    inputs = [boxes, best, most, *options.limits]
    places, count = c.emit_several("NonMaxSuppression", inputs, attrs, count=2, domain=TENSORFLOW)
    number = min(options.number, options.classes)
    own = c.emit("Gather", [scores, places])
    own, classes = c.emit_several("TopK", [own, [number]], {"axis": 1}, count=2)
    if options.number > number:
        ends = [0, 0, 0, options.number - number]
        own, classes = c.emit("Pad", [own, ends]), c.emit("Pad", [classes, ends])
    return c.emit("Gather", [boxes, places]), classes, own, count


def _of_each_class(c: OperatorConversion, options: _Options, boxes: Value, scores: Value) -> _Found:
    """Return boxes chosen for each class separately, and of all of these the best."""
    of_classes = c.emit("Unsqueeze", [c.emit("Transpose", [scores], perm=[1, 0]), [0]])
    each, limit = c.emit("Unsqueeze", [boxes, [0]]), c.constant([options.of_each_class])
    chosen = c.emit("NonMaxSuppression", [each, of_classes, limit, *options.limits])
    chosen_scores = c.emit("GatherND", [scores, c.emit("Gather", [chosen, [2, 1]], axis=1)])
    chosen_scores = c.emit("Pad", [chosen_scores, [0, options.rows], c.constant(-np.inf, FLOAT32)])
    own, best = c.emit_several("TopK", [chosen_scores, [options.rows]], {"axis": 0}, count=2)
    padded = c.emit("Gather", [c.emit("Pad", [chosen, [0, 0, options.rows, 0]]), best])
    _, classes, places = c.emit_several("Split", [padded], {"axis": 1, "num_outputs": 3}, count=3)
    boxes = c.emit("Gather", [boxes, c.emit("Squeeze", [places, [1]])])
    count = c.emit("Min", [c.emit("Shape", [chosen], end=1), [options.most]])
    return boxes, classes, c.emit("Unsqueeze", [own, [1]]), c.cast(count, "int32")
