"""The builtin operators of TFLite and Circle: which LiteRT runs on a CPU, and which Penstock does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from penstock.frontends.tflite.conversion import RULES
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.importer import rule_of

for unknown in ("CUSTOM:unknown", "unknown"):  # imports all modules with rules
    rule_of(unknown)

_NO_OPERATORS = frozenset({"CUSTOM", "DELEGATE", "PLACEHOLDER_FOR_GREATER_OP_CODES"})
_LACKS = """
    CALL CONCAT_EMBEDDINGS STABLEHLO_ABS STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CBRT STABLEHLO_CLAMP
    STABLEHLO_COMPARE STABLEHLO_CONCATENATE STABLEHLO_CONVERT STABLEHLO_CONVOLUTION STABLEHLO_COSINE
    STABLEHLO_CUSTOM_CALL STABLEHLO_DIVIDE STABLEHLO_DOT_GENERAL STABLEHLO_DYNAMIC_SLICE
    STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_IOTA
    STABLEHLO_LOG STABLEHLO_LOGISTIC STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REDUCE
    STABLEHLO_REMAINDER STABLEHLO_RESHAPE STABLEHLO_RSQRT STABLEHLO_SELECT STABLEHLO_SLICE
    STABLEHLO_SORT STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_TRANSPOSE STABLEHLO_WHILE
"""
LITERT_LACKS = frozenset(_LACKS.split())
"""Operators of the schema without a kernel in LiteRT's resolver for the CPU."""
REASONS = {
    "ATTENTION": "Circle's, of which there is no reference to compare with",
    "BCQ_FULLY_CONNECTED": "Circle's binary-coded weights, whose kernels are in no public runtime",
    "BCQ_GATHER": "Circle's binary-coded weights, whose kernels are in no public runtime",
    "GRU": "Circle's, for microcontrollers; converters write UNIDIRECTIONAL layers or loops",
    "RUN_MODEL": "Circle's; packages connect models",
}
"""Why operators that LiteRT or Circle has are not there."""


def names(circle: bool) -> list[str]:
    """The operators of TFLite's schema, or those that Circle adds."""
    operators = schema().operators.items()
    return sorted(n for i, n in operators if (i < 0) == circle and n not in _NO_OPERATORS)


def section() -> Iterator[str]:
    """The lines about them of ``docs/conformance.md``."""
    tflite, circle = names(False), names(True)
    litert = [name for name in tflite if name not in LITERT_LACKS]
    there = [name for name in litert if name in RULES]
    yield _filled(
        f"TFLite's schema has {len(tflite)} builtin operators. LiteRT 2.3 has CPU kernels for "
        f"{len(litert)}, and {len(there)} of these are there. Circle's schema adds {len(circle)}. "
        "Custom operators are operations of the domain `tflite` by their names; "
        "AudioSpectrogram, Mfcc, NumericVerify, TFLite_Detection_PostProcess, aeq.hadamard_rotation and "
        "MediaPipe's Convolution2DTransposeBias are there. "
        "Random numbers have LiteRT's distributions, but not its draws."
    )
    yield ""
    yield _filled(
        "Tensors of int8, uint8 and int16 may be quantized, as a whole or by channel. Weights may "
        "be float16, int8, or packed int4 and int2, also with a scale for each block. With quantized "
        "weights and float activations (dynamic range), dense layers round activations to 8 bits in "
        "each run, as LiteRT's do. In other operators the weights stand for real numbers, and "
        "activations are not rounded: LiteRT's kernels round them, so that its answers differ by up to "
        "1 % of the largest, and are further from those of the float model. "
        "NumericVerify fails only where its result is computed, for it is fetched or read. "
        "Convolutions, dense layers, means of images, LSTMs of 8 bits (without peepholes, projection or "
        "normalized gates), SVDF, ADD, SUB, MUL, HARD_SWISH and LEAKY_RELU, of int16 EXP, GELU, LOG, "
        "LOGISTIC, RSQRT, SOFTMAX and TANH, and REDUCE_PROD give the codes of LiteRT's reference "
        "kernels; answers of other quantized operators are within a quantum of LiteRT's."
    )
    yield ""
    yield _filled(f"**There**, {len(there)}: {_listed(there)}.")
    yield ""
    more = [name for name in (*tflite, *circle) if name in RULES and name not in litert]
    yield _filled(f"**There, though LiteRT has no kernel**, {len(more)}: {_listed(more)}.")
    yield ""
    yield "| not there | why |"
    yield "|---|---|"
    for name in sorted(set(litert + circle) - set(RULES)):
        yield f"| `{name}` | {REASONS[name]} |"
    yield ""
    neither = sorted(set(LITERT_LACKS) - set(RULES))
    yield _filled(f"**Neither there nor in LiteRT**, {len(neither)}: {_listed(neither)}.")


def _listed(operators: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in operators)


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
