"""Models derived from the exporters' by the tools of ONNX Runtime: float16, quantized, optimized.

Each form is made of several models of the zoo, which must have been generated before.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.zoo.store import EXACT, Case, Entry, Product, Recipe, entries, read_feeds

HALF, QUANTIZED = 1e-2, 5e-2

# Models by GROUP/NAME; ONNX Runtime's optimizer has a type for some.
TRANSFORMERS = {
    "transformers/BertModel_eager_script": "bert",
    "transformers/BertModel_dynamo": "bert",
    "transformers/BertForSequenceClassification_script": "bert",
    "transformers/DistilBertModel_eager_script": "bert",
    "transformers/RobertaModel_eager_script": "bert",
    "transformers/GPT2LMHeadModel_eager_script": "gpt2",
    "transformers/GPT2LMHeadModel_dynamo": "gpt2",
    "transformers/T5EncoderModel_eager_script": "t5",
    "transformers/BartModel_eager_script": "bart",
    "transformers/ViTForImageClassification_eager_script": "vit",
    "transformers/ViTForImageClassification_dynamo": "vit",
    "transformers/LlamaForCausalLM_eager_script": "gpt2",
}
NETWORKS = (
    "torchvision/resnet18_script", "torchvision/mobilenet_v2_script",
    "torchvision/mobilenet_v3_small_script", "torchvision/squeezenet1_1_script",
    "torchvision/shufflenet_v2_x0_5_script", "torchvision/efficientnet_b0_script",
    "timm/convnext_atto_script", "timm/mobilevit_xxs_script",
)  # fmt: skip
MODULES = (
    "torch-modules/mlp_script", "torch-modules/mlp_residual_script", "torch-modules/Linear_script",
    "torch-modules/Conv2d_script", "torch-modules/LSTM_script", "torch-modules/GRU_script",
    "torch-modules/TransformerEncoderLayer_script", "torch-modules/MultiheadAttention_script",
    "torch-modules/matmul_heads_script", "torch-modules/ConvTranspose2d_script",
)  # fmt: skip

Form = Callable[[Path, Path, Entry], None]  # reads a model, writes another


def recipes(_: str) -> Iterator[Recipe]:
    warnings.simplefilter("ignore")
    made = {f"{e.group}/{e.name}": e for e in entries() if not e.error}
    for key in (*TRANSFORMERS, *NETWORKS, *MODULES):
        if key not in made:
            print(f"derived: {key} is not there", flush=True)
            continue
        forms = {**FORMS, **(_optimizer(TRANSFORMERS[key]) if key in TRANSFORMERS else {})}
        for name, (form, tolerance) in forms.items():
            make = partial(_product, made[key], form, tolerance < QUANTIZED)
            yield Recipe(f"{key.replace('/', '-')}__{name}", make, tolerance)


def _product(entry: Entry, form: Form, has_answers: bool) -> Product:
    """The model in another form. With ``has_answers`` those of the library hold for it as well: they
    tell which engine is right where float16 jumps, as in the buckets of T5's positions."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "derived.onnx")
        form(entry.path, target, entry)
        model = target.read_bytes()
    types = {i.name: i.type.tensor_type.elem_type for i in onnx.load_from_string(model).graph.input}
    cases = {}
    for name in entry.cases:
        feeds = read_feeds(entry.inputs, entry.case(name))
        cases[name] = Case(
            {
                key: array.astype(np.float16) if types[key] == onnx.TensorProto.FLOAT16 else array
                for key, array in feeds.items()
            },
            entry.answers(name) if has_answers else None,
        )
    return Product(model, cases)


def _half(source: Path, target: Path, _: Entry, keep: bool) -> None:
    from onnxconverter_common.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=keep), target)


def _saved(source: Path, target: Path, _: Entry, level: str) -> None:
    """As ONNX Runtime saves it after optimizing it at ``level``."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _dynamic(source: Path, target: Path, _: Entry, weights: str, per_channel: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source, target, weight_type=getattr(QuantType, weights), per_channel=per_channel
    )


def _static(source: Path, target: Path, entry: Entry, form: str, types: str, **more: Any) -> None:
    """Quantized with the ranges of one batch; ``types``: of activations and of weights."""
    from onnxruntime import quantization

    batch = [read_feeds(entry.inputs, entry.case(entry.cases[-1]))]

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return batch.pop() if batch else None

    activations, weights = types.split()
    quantization.quantize_static(
        source, target, Reader(),
        quant_format=getattr(quantization.QuantFormat, form),
        activation_type=getattr(quantization.QuantType, activations),
        weight_type=getattr(quantization.QuantType, weights),
        **more,
    )  # fmt: skip


def _few_bits(source: Path, target: Path, _: Entry, symmetric: bool, **more: Any) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        onnx.load(source), block_size=32, is_symmetric=symmetric, **more
    )
    quantizer.process()
    onnx.save(quantizer.model.model, target)


def _then(first: Form, second: Form) -> Form:
    def both(source: Path, target: Path, entry: Entry) -> None:
        between = target.with_suffix(".between.onnx")
        first(source, between, entry)
        second(between, target, entry)

    return both


def _optimizer(kind: str) -> dict[str, tuple[Form, float]]:
    """The forms of onnxruntime.transformers, for a model of that type."""

    def optimize(source: Path, target: Path, _: Entry, half: bool) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        options: dict[str, Any] = {"num_heads": 4, "hidden_size": 64}
        model = optimize_model(str(source), kind, **options, use_gpu=False)
        if half:
            model.convert_float_to_float16(keep_io_types=True)
        model.save_model_to_file(str(target))

    plain = partial(optimize, half=False)
    dynamic = partial(_dynamic, weights="QInt8", per_channel=False)
    return {
        "optimizer": (plain, EXACT),
        "optimizer_float16": (partial(optimize, half=True), HALF),
        "optimizer_dynamic_int8": (_then(plain, dynamic), QUANTIZED),
    }


_LEVELS = {
    "basic": partial(_saved, level="ORT_ENABLE_BASIC"),
    "extended": partial(_saved, level="ORT_ENABLE_EXTENDED"),
    "all": partial(_saved, level="ORT_ENABLE_ALL"),
}
_QDQ = partial(_static, form="QDQ", types="QUInt8 QInt8")
_DYNAMIC = partial(_dynamic, weights="QInt8", per_channel=False)
FORMS: dict[str, tuple[Form, float]] = {
    "float16": (partial(_half, keep=True), HALF),
    "float16_inputs": (partial(_half, keep=False), HALF),
    "dynamic_int8": (_DYNAMIC, QUANTIZED),
    "dynamic_uint8": (partial(_dynamic, weights="QUInt8", per_channel=False), QUANTIZED),
    "dynamic_int8_per_channel": (partial(_dynamic, weights="QInt8", per_channel=True), QUANTIZED),
    "dynamic_uint8_per_channel": (partial(_dynamic, weights="QUInt8", per_channel=True), QUANTIZED),
    "qdq_u8s8": (_QDQ, QUANTIZED),
    "qdq_u8u8": (partial(_static, form="QDQ", types="QUInt8 QUInt8"), QUANTIZED),
    "qdq_s8s8": (partial(_static, form="QDQ", types="QInt8 QInt8"), QUANTIZED),
    "qdq_s8s8_per_channel": (
        partial(_static, form="QDQ", types="QInt8 QInt8", per_channel=True), QUANTIZED,
    ),
    "qdq_u16s8": (partial(_static, form="QDQ", types="QUInt16 QInt8"), QUANTIZED),
    "qoperator_u8s8": (partial(_static, form="QOperator", types="QUInt8 QInt8"), QUANTIZED),
    "qoperator_s8s8": (partial(_static, form="QOperator", types="QInt8 QInt8"), QUANTIZED),
    "nbits4": (partial(_few_bits, symmetric=True), QUANTIZED),
    "nbits4_zero_points": (partial(_few_bits, symmetric=False), QUANTIZED),
    "nbits4_accuracy4": (partial(_few_bits, symmetric=True, accuracy_level=4), QUANTIZED),
    **{f"ort_{name}": (saved, EXACT) for name, saved in _LEVELS.items()},
    "qdq_u8s8__ort_extended": (_then(_QDQ, _LEVELS["extended"]), QUANTIZED),
    "qdq_u8s8__ort_all": (_then(_QDQ, _LEVELS["all"]), QUANTIZED),
    "dynamic_int8__ort_extended": (_then(_DYNAMIC, _LEVELS["extended"]), QUANTIZED),
    "float16__ort_extended": (_then(partial(_half, keep=True), _LEVELS["extended"]), HALF),
}  # fmt: skip
