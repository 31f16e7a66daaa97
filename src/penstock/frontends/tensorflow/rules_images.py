"""Rules of operations that resize images or select boxes."""

from __future__ import annotations

import numpy as np

from penstock.frontends.tensorflow.conversion import Conversion, Rule
from penstock.frontends.tensorflow.rules_arrays import vector
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW

RULES: dict[str, Rule] = {}

_HEIGHT_AND_WIDTH = [1, 2]


def _coordinates(c: Conversion) -> str:
    if c.attrs["align_corners"]:
        return "align_corners"
    return "half_pixel" if c.attrs["half_pixel_centers"] else "asymmetric"


def bilinear(c: Conversion) -> None:
    """The result is float32 for images of any element type."""
    image = c.inputs[0]
    if c.dtype(0) != np.float32:
        image = c.emit("Cast", [image], {"to": element_number("float32")})
    attrs = {
        "axes": _HEIGHT_AND_WIDTH,
        "mode": "linear",
        "coordinate_transformation_mode": _coordinates(c),
    }
    c.emit_final("Resize", [image, None, None, vector(c, 1)], attrs)


def nearest(c: Conversion) -> None:
    """Coordinates are rounded down, or to the nearest with centres or corners aligned."""
    coordinates = _coordinates(c)
    attrs = {
        "axes": _HEIGHT_AND_WIDTH,
        "mode": "nearest",
        "coordinate_transformation_mode": coordinates,
        "nearest_mode": "floor" if coordinates == "asymmetric" else "round_prefer_ceil",
    }
    c.emit_final("Resize", [c.inputs[0], None, None, vector(c, 1)], attrs)


def suppression(c: Conversion) -> None:
    """All versions except the combined one."""
    names = ("iou_threshold", "pad_to_max_output_size")
    attrs = {key: c.attrs[key] for key in names if key in c.attrs}
    attrs["outputs"] = len(c.outputs)
    c.emit_final("NonMaxSuppression", attrs=attrs, domain=TENSORFLOW)


_VERSIONS = ("", "V2", "V3", "V4", "V5")
RULES.update({f"NonMaxSuppression{version}": suppression for version in _VERSIONS})
RULES.update({"ResizeBilinear": bilinear, "ResizeNearestNeighbor": nearest})
