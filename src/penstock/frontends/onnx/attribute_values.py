"""Attributes with a closed set of values, which ONNX's schemas name in prose only.

Operations check the modes that they read (``shape_rules.choice``). Here are flags, and modes that
not every kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Integers that are 0 or 1 in every operation that has them.
_FLAGS = frozenset(
    """
    align_corners allowzero antialias broadcast ceil_mode center_point_box channels_last
    count_include_pad detect_negative detect_positive do_rotary exclude_outside exclusive fmod
    input_forget interleaved inverse is_case_sensitive is_causal is_test keepdims largest layout
    linear_before_reset multi_class new_axis noop_with_empty_axes one_class onesided output_sequence
    periodic reverse saturate select_last_index sorted spatial storage_order training_mode transA
    transB transBatchA transBatchB unidirectional upper zeros
    """.split()  # noqa: SIM905 - a list of words
)

_MODES: Mapping[tuple[str, str], tuple[int | str, ...]] = {
    ("Attention", "qk_matmul_output_mode"): (0, 1, 2, 3),
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    ("Gelu", "approximate"): ("none", "tanh"),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch", "not_larger", "not_smaller"),
    ("Resize", "nearest_mode"): ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    ("RoiAlign", "coordinate_transformation_mode"): ("half_pixel", "output_half_pixel"),
}


def value_faults(op: str, names: Iterable[str], attrs: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of attributes, as ends of sentences that begin with the node.

    ``names`` are those that the node has; ``attrs`` may have others, by default.
    """
    for name in names:
        allowed = (0, 1) if name in _FLAGS else _MODES.get((op, name))
        value = attrs.get(name)
        if allowed is not None and isinstance(value, int | str) and value not in allowed:
            listed = ", ".join(map(repr, allowed))
            yield f"has {name} = {value!r:.40}, which must be one of {listed}"
