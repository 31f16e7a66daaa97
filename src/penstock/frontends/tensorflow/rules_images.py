"""Rules: images in another size, boxes in them."""

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
    """The result is float32, whatever the image was."""
    image = c.inputs[0]
    if c.dtype(0) != np.float32:
        image = c.node("Cast", [image], {"to": element_number("float32")})
    attrs = {
        "axes": _HEIGHT_AND_WIDTH,
        "mode": "linear",
        "coordinate_transformation_mode": _coordinates(c),
    }
    c.end("Resize", [image, None, None, vector(c, 1)], attrs)


def nearest(c: Conversion) -> None:
    """Places are rounded down, but to the nearest where they are those of centres or corners."""
    coordinates = _coordinates(c)
    attrs = {
        "axes": _HEIGHT_AND_WIDTH,
        "mode": "nearest",
        "coordinate_transformation_mode": coordinates,
        "nearest_mode": "floor" if coordinates == "asymmetric" else "round_prefer_ceil",
    }
    c.end("Resize", [c.inputs[0], None, None, vector(c, 1)], attrs)


def suppression(c: Conversion) -> None:
    """All versions but the combined one."""
    kept = ("iou_threshold", "pad_to_max_output_size")
    attrs = {key: c.attrs[key] for key in kept if key in c.attrs}
    attrs["outputs"] = len(c.outputs)
    c.end("NonMaxSuppression", attrs=attrs, domain=TENSORFLOW)


_VERSIONS = ("", "V2", "V3", "V4", "V5")
RULES.update({f"NonMaxSuppression{version}": suppression for version in _VERSIONS})
RULES.update({"ResizeBilinear": bilinear, "ResizeNearestNeighbor": nearest})
