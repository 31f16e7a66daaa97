"""Keras models and functions of TensorFlow, as Keras and tf2onnx write them.

The group "keras" has models that ``model.export(format="onnx")`` writes, "tensorflow" functions
that tf2onnx traces. Both come as TensorFlow has images, channels last, with Transposes around what
ONNX has channels first.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.zoo.store import Case, Feeds, Product, Recipe

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROWS = {"row": 1, "batch": 8}
LOOSE = 1e-3  # of deep networks

# Layers by name, written with "layers" for keras.layers, and what they take for one row; several
# inputs are a list of shapes. Whole numbers below the second number where the shape has a name.
IMAGE, SIGNAL, CUBE, ROW = (16, 16, 8), (20, 8), (6, 8, 8, 4), (32,)
LAYERS: dict[str, tuple[str, Any]] = {
    "Dense": ("layers.Dense(16)", ROW),
    "Dense_relu": ("layers.Dense(16, activation='relu')", ROW),
    "Dense_softmax": ("layers.Dense(10, activation='softmax')", ROW),
    "Dense_3d": ("layers.Dense(16, activation='gelu')", SIGNAL),
    "Dense_no_bias": ("layers.Dense(16, use_bias=False)", ROW),
    "EinsumDense": ("layers.EinsumDense('abc,cde->abde', output_shape=(None, 4, 6), bias_axes='de')", SIGNAL),
    "Conv1D": ("layers.Conv1D(12, 3, activation='relu')", SIGNAL),
    "Conv1D_causal": ("layers.Conv1D(12, 3, padding='causal', dilation_rate=2)", SIGNAL),
    "Conv2D": ("layers.Conv2D(12, 3)", IMAGE),
    "Conv2D_same": ("layers.Conv2D(12, 3, padding='same', activation='relu')", IMAGE),
    "Conv2D_stride": ("layers.Conv2D(12, 3, 2, padding='same')", IMAGE),
    "Conv2D_dilated": ("layers.Conv2D(12, 3, dilation_rate=2, padding='same')", IMAGE),
    "Conv2D_groups": ("layers.Conv2D(16, 3, groups=4, padding='same')", IMAGE),
    "Conv2D_1x1": ("layers.Conv2D(16, 1, activation='swish')", IMAGE),
    "Conv2D_first": ("layers.Conv2D(16, 3, data_format='channels_last', strides=2)", (32, 32, 3)),
    "Conv3D": ("layers.Conv3D(6, 3, padding='same')", CUBE),
    "DepthwiseConv1D": ("layers.DepthwiseConv1D(3, depth_multiplier=2)", SIGNAL),
    "DepthwiseConv2D": ("layers.DepthwiseConv2D(3, padding='same')", IMAGE),
    "DepthwiseConv2D_multiplier": ("layers.DepthwiseConv2D(5, 2, 'same', depth_multiplier=2)", IMAGE),
    "SeparableConv1D": ("layers.SeparableConv1D(12, 3, padding='same')", SIGNAL),
    "SeparableConv2D": ("layers.SeparableConv2D(12, 3, padding='same', activation='relu')", IMAGE),
    "Conv1DTranspose": ("layers.Conv1DTranspose(6, 4, 2, padding='same')", SIGNAL),
    "Conv2DTranspose": ("layers.Conv2DTranspose(6, 4, 2, padding='same')", IMAGE),
    "Conv2DTranspose_valid": ("layers.Conv2DTranspose(6, 3, 2)", IMAGE),
    "Conv3DTranspose": ("layers.Conv3DTranspose(3, 3, 2, padding='same')", CUBE),
    "MaxPooling1D": ("layers.MaxPooling1D(2)", SIGNAL),
    "MaxPooling2D": ("layers.MaxPooling2D(2)", IMAGE),
    "MaxPooling2D_same": ("layers.MaxPooling2D(3, 2, padding='same')", IMAGE),
    "MaxPooling3D": ("layers.MaxPooling3D(2)", CUBE),
    "AveragePooling1D": ("layers.AveragePooling1D(2)", SIGNAL),
    "AveragePooling2D_same": ("layers.AveragePooling2D(3, 2, padding='same')", IMAGE),
    "AveragePooling3D": ("layers.AveragePooling3D(2)", CUBE),
    "GlobalMaxPooling1D": ("layers.GlobalMaxPooling1D()", SIGNAL),
    "GlobalMaxPooling2D": ("layers.GlobalMaxPooling2D(keepdims=True)", IMAGE),
    "GlobalAveragePooling2D": ("layers.GlobalAveragePooling2D()", IMAGE),
    "GlobalAveragePooling3D": ("layers.GlobalAveragePooling3D()", CUBE),
    "AdaptiveAveragePooling2D": ("layers.AdaptiveAveragePooling2D((5, 3))", IMAGE),
    "AdaptiveMaxPooling2D": ("layers.AdaptiveMaxPooling2D((5, 3))", IMAGE),
    "BatchNormalization": ("layers.BatchNormalization()", IMAGE),
    "BatchNormalization_row": ("layers.BatchNormalization(scale=False)", ROW),
    "LayerNormalization": ("layers.LayerNormalization()", SIGNAL),
    "LayerNormalization_axes": ("layers.LayerNormalization(axis=(1, 2))", IMAGE),
    "RMSNormalization": ("layers.RMSNormalization()", SIGNAL),
    "GroupNormalization": ("layers.GroupNormalization(4)", IMAGE),
    "UnitNormalization": ("layers.UnitNormalization()", SIGNAL),
    "SpectralNormalization": ("layers.SpectralNormalization(layers.Conv2D(6, 3))", IMAGE),
    "Normalization": ("layers.Normalization(mean=0.3, variance=2.0)", SIGNAL),
    "LSTM": ("layers.LSTM(16)", SIGNAL),
    "LSTM_sequences": ("layers.LSTM(16, return_sequences=True)", SIGNAL),
    "LSTM_state": ("layers.LSTM(16, return_sequences=True, return_state=True)", SIGNAL),
    "LSTM_backwards": ("layers.LSTM(16, go_backwards=True, return_sequences=True)", SIGNAL),
    "LSTM_unrolled": ("layers.LSTM(8, unroll=True)", (5, 8)),
    "LSTM_activations": ("layers.LSTM(16, activation='relu', recurrent_activation='hard_sigmoid')", SIGNAL),
    "GRU": ("layers.GRU(16)", SIGNAL),
    "GRU_sequences": ("layers.GRU(16, return_sequences=True)", SIGNAL),
    "GRU_reset_before": ("layers.GRU(16, reset_after=False, return_sequences=True)", SIGNAL),
    "SimpleRNN": ("layers.SimpleRNN(16)", SIGNAL),
    "SimpleRNN_sequences": ("layers.SimpleRNN(16, return_sequences=True, activation='relu')", SIGNAL),
    "Bidirectional_LSTM": ("layers.Bidirectional(layers.LSTM(12, return_sequences=True))", SIGNAL),
    "Bidirectional_GRU_sum": ("layers.Bidirectional(layers.GRU(12), merge_mode='sum')", SIGNAL),
    "Bidirectional_SimpleRNN": ("layers.Bidirectional(layers.SimpleRNN(12), merge_mode='ave')", SIGNAL),
    "RNN_stacked": ("layers.RNN([layers.LSTMCell(12), layers.GRUCell(8)])", SIGNAL),
    "ConvLSTM1D": ("layers.ConvLSTM1D(4, 3, padding='same')", (6, 10, 3)),
    "ConvLSTM2D": ("layers.ConvLSTM2D(4, 3, padding='same', return_sequences=True)", (4, 8, 8, 3)),
    "TimeDistributed": ("layers.TimeDistributed(layers.Conv2D(4, 3))", (4, 8, 8, 3)),
    "Masking_LSTM": ("keras.Sequential([layers.Masking(), layers.LSTM(8)])", SIGNAL),
    "Embedding": ("layers.Embedding(50, 12)", ("int32", 50, 9)),
    "Embedding_LSTM_masked": ("keras.Sequential([layers.Embedding(50, 12, mask_zero=True), layers.LSTM(8)])", ("int32", 50, 9)),
    "Embedding_pooled_masked": ("keras.Sequential([layers.Embedding(50, 12, mask_zero=True), layers.GlobalAveragePooling1D()])", ("int32", 50, 9)),
    "Attention": ("layers.Attention()", [SIGNAL, SIGNAL]),
    "Attention_concat": ("layers.Attention(score_mode='concat', use_scale=True)", [(6, 8), (9, 8)]),
    "Attention_causal": ("layers.Attention()", [SIGNAL, SIGNAL]),
    "AdditiveAttention": ("layers.AdditiveAttention()", [SIGNAL, SIGNAL]),
    "MultiHeadAttention": ("layers.MultiHeadAttention(4, 8)", [SIGNAL, (9, 8)]),
    "MultiHeadAttention_causal": ("layers.MultiHeadAttention(4, 8)", [SIGNAL, SIGNAL]),
    "MultiHeadAttention_2d": ("layers.MultiHeadAttention(2, 4, attention_axes=(1, 2))", [(4, 5, 8), (4, 5, 8)]),
    "GroupQueryAttention": ("layers.GroupQueryAttention(8, 4, 2)", [SIGNAL, SIGNAL]),
    "Concatenate": ("layers.Concatenate()", [IMAGE, IMAGE]),
    "Add": ("layers.Add()", [IMAGE, IMAGE, IMAGE]),
    "Average": ("layers.Average()", [ROW, ROW]),
    "Maximum": ("layers.Maximum()", [ROW, ROW]),
    "Dot": ("layers.Dot(axes=(2, 2), normalize=True)", [SIGNAL, SIGNAL]),
    "UpSampling1D": ("layers.UpSampling1D(3)", SIGNAL),
    "UpSampling2D": ("layers.UpSampling2D(2)", IMAGE),
    "UpSampling2D_bilinear": ("layers.UpSampling2D(2, interpolation='bilinear')", IMAGE),
    "UpSampling2D_bicubic": ("layers.UpSampling2D(2, interpolation='bicubic')", IMAGE),
    "UpSampling2D_lanczos3": ("layers.UpSampling2D(2, interpolation='lanczos3')", IMAGE),
    "UpSampling3D": ("layers.UpSampling3D(2)", CUBE),
    "Resizing": ("layers.Resizing(10, 12)", IMAGE),
    "Resizing_nearest": ("layers.Resizing(24, 10, interpolation='nearest')", IMAGE),
    "Resizing_crop": ("layers.Resizing(10, 8, crop_to_aspect_ratio=True)", IMAGE),
    "Resizing_antialias": ("layers.Resizing(7, 9, antialias=True)", IMAGE),
    "CenterCrop": ("layers.CenterCrop(8, 6)", IMAGE),
    "Rescaling": ("layers.Rescaling(1 / 255, offset=-0.5)", IMAGE),
    "ZeroPadding1D": ("layers.ZeroPadding1D((1, 2))", SIGNAL),
    "ZeroPadding2D": ("layers.ZeroPadding2D(((1, 2), (3, 4)))", IMAGE),
    "ZeroPadding3D": ("layers.ZeroPadding3D(1)", CUBE),
    "Cropping1D": ("layers.Cropping1D((2, 1))", SIGNAL),
    "Cropping2D": ("layers.Cropping2D(((1, 2), (3, 4)))", IMAGE),
    "Reshape": ("layers.Reshape((-1, 4))", SIGNAL),
    "Permute": ("layers.Permute((2, 1))", SIGNAL),
    "Flatten": ("layers.Flatten()", IMAGE),
    "RepeatVector": ("layers.RepeatVector(3)", ROW),
    "PReLU": ("layers.PReLU(shared_axes=[1, 2], alpha_initializer='random_normal')", IMAGE),
    "LeakyReLU": ("layers.LeakyReLU(negative_slope=0.1)", IMAGE),
    "ReLU6": ("layers.ReLU(max_value=6.0, negative_slope=0.1, threshold=0.2)", IMAGE),
    "ELU": ("layers.ELU(alpha=0.7)", IMAGE),
    "Softmax_axis": ("layers.Softmax(axis=1)", SIGNAL),
    "Softmax_axes": ("layers.Softmax(axis=(1, 2))", SIGNAL),
    "ActivityRegularization": ("layers.ActivityRegularization(0.1)", ROW),
    "Dropout": ("layers.Dropout(0.5)", ROW),
    "GaussianNoise": ("layers.GaussianNoise(0.5)", ROW),
    "RandomFlip": ("layers.RandomFlip()", IMAGE),
    "Discretization": ("layers.Discretization(bin_boundaries=[-1.0, 0.0, 0.5])", ROW),
    "Discretization_one_hot": ("layers.Discretization(bin_boundaries=[-1.0, 0.0, 0.5], output_mode='one_hot')", (1,)),
    "CategoryEncoding": ("layers.CategoryEncoding(10, output_mode='multi_hot')", ("int32", 10, 6)),
    "CategoryEncoding_one_hot": ("layers.CategoryEncoding(10, output_mode='one_hot')", ("int32", 10, 1)),
    "IntegerLookup": ("layers.IntegerLookup(vocabulary=[3, 5, 8, 13])", ("int64", 20, 6)),
    "HashedCrossing": ("layers.HashedCrossing(12)", [("int32", 10, 1), ("int32", 10, 1)]),
    "STFTSpectrogram": ("layers.STFTSpectrogram(frame_length=32, frame_step=16, fft_length=32)", (256, 1)),
    "MelSpectrogram": ("layers.MelSpectrogram(fft_length=64, sequence_stride=16, num_mel_bins=8)", (256,)),
    **{f"activation_{name}": (f"layers.Activation({name!r})", SIGNAL) for name in (
        "relu", "relu6", "elu", "selu", "celu", "gelu", "sigmoid", "hard_sigmoid", "silu", "hard_silu",
        "tanh", "hard_tanh", "softplus", "softsign", "exponential", "mish", "log_softmax", "glu",
        "squareplus", "soft_shrink", "sparse_plus", "sparsemax", "tanh_shrink", "threshold", "log_sigmoid",
    )},
}  # fmt: skip

# Whole networks of keras.applications, without weights, and the side of their images.
APPLICATIONS = {
    "MobileNet": 64, "MobileNetV2": 64, "MobileNetV3Small": 64, "EfficientNetB0": 64,
    "EfficientNetV2B0": 64, "ResNet50V2": 64, "DenseNet121": 64, "ConvNeXtTiny": 64,
}  # fmt: skip


def _transformer(keras: Any) -> Any:
    """A classifier of tokens with two blocks of an encoder."""
    layers = keras.layers
    tokens = keras.Input((24,), dtype="int32", name="x0")
    x = layers.Embedding(100, 32)(tokens) + layers.Embedding(24, 32)(keras.ops.arange(24))
    for _ in range(2):
        a = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 8)(a, a)
        a = layers.LayerNormalization()(x)
        x = x + layers.Dense(32)(layers.Dense(64, activation="gelu")(a))
    return keras.Model(tokens, layers.Dense(5, activation="softmax")(x[:, 0]))


def _unet(keras: Any) -> Any:
    layers = keras.layers
    image = keras.Input((32, 32, 3), name="x0")
    skips, x = [], image
    for width in (8, 16):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    for width, skip in ((16, skips[1]), (8, skips[0])):
        x = layers.Concatenate()([layers.Conv2DTranspose(width, 2, 2)(x), skip])
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Conv2D(4, 1, activation="softmax")(x))


NETWORKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "transformer": (_transformer, ("int32", 100, 24)),
    "unet": (_unet, (32, 32, 3)),
}

# Functions of TensorFlow, written with "tf", of inputs x, or x and y.
FUNCTIONS: dict[str, tuple[str, Any]] = {
    **{f"math_{name}": (f"tf.math.{name}(x)", SIGNAL) for name in (
        "abs", "acos", "acosh", "asin", "asinh", "atan", "ceil", "cos", "cosh", "digamma", "erf", "erfc",
        "exp", "expm1", "floor", "is_finite", "is_inf", "is_nan", "lgamma", "log1p", "log_sigmoid", "negative",
        "reciprocal", "rint", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "softplus", "softsign",
        "sqrt", "square", "tan", "tanh", "reduce_logsumexp", "reduce_std", "reduce_variance",
        "reduce_euclidean_norm", "bessel_i0e", "erfinv", "ndtri",
    )},
    **{f"math_{name}": (f"tf.math.{name}(x, y)", [SIGNAL, SIGNAL]) for name in (
        "add", "atan2", "divide_no_nan", "floordiv", "floormod", "multiply_no_nan", "maximum", "mod", "pow",
        "squared_difference", "truediv", "xdivy", "xlogy", "less_equal", "not_equal", "nextafter",
    )},
    **{f"nn_{name}": (f"tf.nn.{name}(x)", SIGNAL) for name in ("elu", "gelu", "leaky_relu", "relu6", "selu", "silu", "crelu", "l2_normalize")},
    "argmax": ("tf.argmax(x, 1)", SIGNAL),
    "argsort": ("tf.argsort(x, direction='DESCENDING')", SIGNAL),
    "sort": ("tf.sort(x)", SIGNAL),
    "top_k": ("tf.math.top_k(x, 3)", SIGNAL),
    "in_top_k": ("tf.math.in_top_k(tf.argmax(x, 1), x, 3)", ROW),
    "cumsum": ("tf.cumsum(x, 1, exclusive=True, reverse=True)", SIGNAL),
    "cumprod": ("tf.math.cumprod(tf.math.sigmoid(x), 1)", SIGNAL),
    "cumulative_logsumexp": ("tf.math.cumulative_logsumexp(x, 1)", SIGNAL),
    "reduce_all": ("tf.reduce_all(x > -2.0, 1)", SIGNAL),
    "reduce_prod": ("tf.reduce_prod(x, (1, 2))", (4, 3)),
    "bincount": ("tf.math.bincount(x, minlength=12, maxlength=12)", ("int32", 12, 30)),
    "segment_sum": ("tf.math.unsorted_segment_sum(x, tf.constant([0, 1, 0, 2, 1, 0, 2, 3]), 4)", ("fixed", 8, 5)),
    "segment_max": ("tf.math.segment_max(x, tf.constant([0, 0, 1, 1, 1, 2, 2, 3]))", ("fixed", 8, 5)),
    "segment_mean": ("tf.math.unsorted_segment_mean(x, tf.constant([0, 1, 0, 2, 1, 0, 2, 3]), 4)", ("fixed", 8, 5)),
    "einsum_attention": ("tf.einsum('bic,bjc->bij', x, y)", [SIGNAL, SIGNAL]),
    "einsum_outer": ("tf.einsum('bi,bj,bk->bijk', x, x, y)", [(4,), (5,)]),
    "einsum_diagonal": ("tf.einsum('bii->bi', x)", (6, 6)),
    "matmul_transposed": ("tf.matmul(x, y, transpose_b=True)", [SIGNAL, SIGNAL]),
    "tensordot": ("tf.tensordot(x, tf.constant(np.ones((8, 3, 2), 'f')), [[2], [0]])", SIGNAL),
    "matrix_band_part": ("tf.linalg.band_part(x, 1, 2)", (6, 6)),
    "matrix_diag": ("tf.linalg.diag(x)", (6,)),
    "matrix_diag_part": ("tf.linalg.diag_part(x)", (6, 6)),
    "matrix_set_diag": ("tf.linalg.set_diag(x, y)", [(6, 6), (6,)]),
    "matrix_det": ("tf.linalg.det(x)", (5, 5)),
    "matrix_inverse": ("tf.linalg.inv(x)", (5, 5)),
    "trace": ("tf.linalg.trace(x)", (5, 5)),
    "cross": ("tf.linalg.cross(x, y)", [(7, 3), (7, 3)]),
    "gather": ("tf.gather(x, tf.constant([3, 0, 2]), axis=1)", SIGNAL),
    "gather_batch": ("tf.gather(x, tf.argsort(x, 1)[:, :4, 0], batch_dims=1)", SIGNAL),
    "gather_nd": ("tf.gather_nd(x, tf.constant([[0, 3], [0, 5]]))", SIGNAL),
    "scatter_nd": ("tf.scatter_nd(tf.constant([[1], [3], [1]]), x, [6, 5])", ("fixed", 3, 5)),
    "tensor_scatter_update": ("tf.tensor_scatter_nd_update(x, tf.constant([[1], [4]]), x[2:4])", ("fixed", 8, 5)),
    "tensor_scatter_add": ("tf.tensor_scatter_nd_add(x, tf.constant([[1], [1]]), x[2:4])", ("fixed", 8, 5)),
    "tensor_scatter_max": ("tf.tensor_scatter_nd_max(x, tf.constant([[1], [1]]), x[2:4])", ("fixed", 8, 5)),
    "boolean_mask": ("tf.boolean_mask(x, x[:, :, 0] > 0)", SIGNAL),
    "where": ("tf.where(x > 0.5)", SIGNAL),
    "where_select": ("tf.where(x > y, x, -y)", [SIGNAL, SIGNAL]),
    "unique": ("tf.unique(tf.reshape(x, [-1]))[0]", ("int32", 9, 30)),
    "unique_counts": ("tf.unique_with_counts(tf.reshape(x, [-1]))", ("int32", 9, 30)),
    "searchsorted": ("tf.searchsorted(tf.sort(x), y, side='right')", [(12,), (5,)]),
    "one_hot": ("tf.one_hot(x, 12, on_value=2.0, off_value=-1.0, axis=1)", ("int32", 12, 6)),
    "sequence_mask": ("tf.sequence_mask(x, 12)", ("int32", 12, 6)),
    "range": ("tf.range(tf.shape(x)[0]) * 2", SIGNAL),
    "linspace": ("tf.linspace(0.0, 1.0, 7) + x[:, :1, 0]", SIGNAL),
    "eye": ("tf.eye(tf.shape(x)[1]) + x[:, :, :1]", SIGNAL),
    "fill": ("tf.fill(tf.shape(x), 3.0) + x", SIGNAL),
    "meshgrid": ("tf.meshgrid(x[0, :, 0], x[0, 0])", SIGNAL),
    "roll": ("tf.roll(x, [2, -1], [1, 2])", SIGNAL),
    "reverse": ("tf.reverse(x, [1])", SIGNAL),
    "reverse_sequence": ("tf.reverse_sequence(x, tf.fill([tf.shape(x)[0]], 7), 1)", SIGNAL),
    "tile": ("tf.tile(x, [1, 2, 3])", SIGNAL),
    "repeat": ("tf.repeat(x, 3, axis=1)", SIGNAL),
    "stack_unstack": ("tf.stack(tf.unstack(x, axis=2)[::-1], axis=1)", SIGNAL),
    "split": ("tf.split(x, [3, 5], axis=2)", SIGNAL),
    "strided_slice": ("x[:, 1:-2:3, tf.newaxis, ..., ::-1]", SIGNAL),
    "pad_reflect": ("tf.pad(x, [[0, 0], [2, 3], [1, 1]], 'REFLECT')", SIGNAL),
    "pad_symmetric": ("tf.pad(x, [[0, 0], [2, 3], [1, 1]], 'SYMMETRIC')", SIGNAL),
    "space_to_depth": ("tf.nn.space_to_depth(x, 2)", IMAGE),
    "depth_to_space": ("tf.nn.depth_to_space(x, 2)", IMAGE),
    "space_to_batch": ("tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])", IMAGE),
    "batch_to_space": ("tf.batch_to_space(tf.concat([x] * 4, 0), [2, 2], [[0, 1], [1, 0]])", IMAGE),
    "extract_patches": ("tf.image.extract_patches(x, [1, 3, 3, 1], [1, 2, 2, 1], [1, 1, 1, 1], 'SAME')", IMAGE),
    "dilation2d": ("tf.nn.dilation2d(x, tf.constant(np.ones((3, 3, 8), 'f')), [1, 1, 1, 1], 'SAME', 'NHWC', [1, 1, 1, 1])", IMAGE),
    "atrous_conv2d": ("tf.nn.atrous_conv2d(x, tf.constant(np.ones((3, 3, 8, 4), 'f')), 2, 'SAME')", IMAGE),
    "max_pool_argmax": ("tf.nn.max_pool_with_argmax(x, 2, 2, 'VALID')", IMAGE),
    "lrn": ("tf.nn.local_response_normalization(x)", IMAGE),
    "moments": ("tf.nn.moments(x, [1, 2])", IMAGE),
    "image_resize": ("tf.image.resize(x, [9, 31])", IMAGE),
    "image_resize_area": ("tf.image.resize(x, [8, 8], 'area')", IMAGE),
    "image_resize_bicubic": ("tf.image.resize(x, [9, 31], 'bicubic')", IMAGE),
    "image_resize_v1_corners": ("tf.compat.v1.image.resize_bilinear(x, [9, 31], align_corners=True)", IMAGE),
    "image_resize_v1": ("tf.compat.v1.image.resize_nearest_neighbor(x, [9, 31])", IMAGE),
    "crop_and_resize": ("tf.image.crop_and_resize(x, tf.constant([[0.1, 0.2, 0.7, 0.9]]), [0], [5, 6])", IMAGE),
    "adjust_contrast": ("tf.image.adjust_contrast(x, 1.4)", (16, 16, 3)),
    "adjust_hue": ("tf.image.adjust_hue(tf.sigmoid(x), 0.2)", (16, 16, 3)),
    "rgb_to_hsv": ("tf.image.rgb_to_hsv(tf.sigmoid(x))", (16, 16, 3)),
    "rgb_to_grayscale": ("tf.image.rgb_to_grayscale(x)", (16, 16, 3)),
    "non_max_suppression": ("tf.image.non_max_suppression(x[0, :, :4], x[0, :, 4], 5)", SIGNAL),
    "combined_nms": ("tf.image.combined_non_max_suppression(x[:, :, None, :4], x[:, :, 4:], 5, 9)", SIGNAL),
    "fft": ("tf.abs(tf.signal.rfft(x))", (64,)),
    "stft": ("tf.abs(tf.signal.stft(x, 32, 16))", (256,)),
    "ctc_greedy": ("tf.nn.ctc_greedy_decoder(tf.transpose(x, [1, 0, 2]), tf.fill([tf.shape(x)[0]], 20))[0][0].values", SIGNAL),
    "cond": ("tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1)", SIGNAL),
    "switch_case": ("tf.switch_case(tf.shape(x)[0] % 3, [lambda: x, lambda: x + 1, lambda: -x])", SIGNAL),
    "while_loop": ("tf.while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, tf.tanh(a + x)), (0, x))[1]", SIGNAL),
    "while_data": ("tf.while_loop(lambda a: tf.reduce_max(a) > 0.01, lambda a: (a * 0.5,), (x,))[0]", SIGNAL),
    "map_fn": ("tf.map_fn(lambda a: tf.reduce_sum(a[:3]) + a, x)", SIGNAL),
    "scan": ("tf.scan(lambda a, b: a * 0.5 + b, tf.transpose(x, [1, 0, 2]))", SIGNAL),
    "tensor_array": ("Loop(tf)(x)", SIGNAL),
    "cast_bool": ("tf.cast(tf.cast(x, tf.bool), tf.int64)", SIGNAL),
    "cast_uint8": ("tf.cast(tf.cast(tf.abs(x) * 10, tf.uint8), tf.float32)", SIGNAL),
    "float16": ("tf.cast(tf.nn.softmax(tf.cast(x, tf.float16)), tf.float32)", SIGNAL),
    "float64": ("tf.linalg.matmul(tf.cast(x, tf.float64), tf.cast(x, tf.float64), transpose_b=True)", SIGNAL),
    "bitwise": ("tf.bitwise.bitwise_xor(x, tf.bitwise.left_shift(x, 2))", ("int32", 50, 9)),
    "int_division": ("tf.math.floordiv(x - 20, 7), tf.math.floormod(x - 20, 7), tf.truncatediv(x - 20, 7)", ("int32", 50, 9)),
    "fake_quant": ("tf.quantization.fake_quant_with_min_max_args(x, -1.5, 2.0)", SIGNAL),
    "fake_quant_4": ("tf.quantization.fake_quant_with_min_max_args(x, -1.5, 2.0, num_bits=4)", SIGNAL),
    "clip_by_norm": ("tf.clip_by_norm(x, 2.0, axes=[1])", SIGNAL),
    "softmax_cross_entropy": ("tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x)", [ROW, ROW]),
    "sparse_cross_entropy": ("tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(y, 1), x)", [ROW, ROW]),
    "confusion_matrix": ("tf.math.confusion_matrix(tf.reshape(x, [-1]), tf.reshape(x, [-1]) % 3, 6)", ("int32", 6, 9)),
    "ensure_shape": ("tf.ensure_shape(x, [None, 20, 8]) * 2", SIGNAL),
    "identity_n": ("tf.identity_n([x, y])", [SIGNAL, SIGNAL]),
    "add_n": ("tf.add_n([x, y, x])", [SIGNAL, SIGNAL]),
    "string_join": ("tf.strings.join([tf.strings.as_string(x), tf.constant('a')])", ("int32", 6, 9)),
}  # fmt: skip


def recipes(group: str) -> Iterator[Recipe]:
    if group == "tensorflow":
        for name, (text, shapes) in FUNCTIONS.items():
            yield Recipe(name, partial(_function, text, shapes))
        return
    for name, (text, shapes) in LAYERS.items():
        yield Recipe(name, partial(_network, partial(_layer, name, text, shapes), shapes))
    for name, (build, shapes) in NETWORKS.items():
        yield Recipe(name, partial(_network, build, shapes))
    for name, side in APPLICATIONS.items():
        shape = (side, side, 3)
        yield Recipe(name, partial(_network, partial(_application, name, shape), shape), LOOSE)


def _specifications(shapes: Any) -> list[tuple[str, int, tuple[int, ...]]]:
    """Of each input its type, the number that its whole numbers are below, and its shape."""
    several = shapes if isinstance(shapes, list) else [shapes]
    return [(s[0], s[1], s[2:]) if isinstance(s[0], str) else ("float32", 0, s) for s in several]


def _feeds(shapes: Any, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for kind, below, shape in _specifications(shapes):
        if kind == "fixed":  # as many rows as ``below`` says
            arrays.append(rng.standard_normal((below, *shape)).astype(np.float32))
        elif below:
            arrays.append(rng.integers(0, below, (rows, *shape)).astype(kind))
        else:
            arrays.append(rng.standard_normal((rows, *shape)).astype(np.float32))
    return arrays


def _layer(name: str, text: str, shapes: Any, keras: Any) -> Any:
    layer = eval(text, {"keras": keras, "layers": keras.layers})
    inputs = [
        keras.Input(shape, dtype=kind, name=f"x{number}")
        for number, (kind, _, shape) in enumerate(_specifications(shapes))
    ]
    options = {"use_causal_mask": True} if name.endswith("Attention_causal") else {}
    if "HeadAttention" in text or "QueryAttention" in text:
        return keras.Model(inputs, layer(*inputs, **options))
    return keras.Model(inputs, layer(inputs if len(inputs) > 1 else inputs[0], **options))


def _application(name: str, shape: tuple[int, ...], keras: Any) -> Any:
    return getattr(keras.applications, name)(weights=None, input_shape=shape, classes=10)


def _network(build: Callable[[Any], Any], shapes: Any) -> Product:
    _quiet()
    import keras

    keras.utils.set_random_seed(0)
    model = build(keras)

    def answer(arrays: Sequence[np.ndarray]) -> Any:
        return model(list(arrays) if len(arrays) > 1 else arrays[0], training=False)

    answer(_feeds(shapes, 1))  # which has to be before an export
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        model.export(str(path), format="onnx", verbose=False)
        written = path.read_bytes()
    return _product(written, shapes, answer)


def _function(text: str, shapes: Any) -> Product:
    _quiet()
    import tensorflow as tf
    import tf2onnx

    inputs = _specifications(shapes)
    signature = [
        tf.TensorSpec(
            (below if kind == "fixed" else None, *shape),
            "float32" if kind == "fixed" else kind,
            name=f"x{number}",
        )
        for number, (kind, below, shape) in enumerate(inputs)
    ]
    names = ("x", "y")[: len(inputs)]
    scope = {"tf": tf, "np": np, "Loop": _loop}
    function = tf.function(
        eval(
            f"lambda {', '.join(names)}: {text if ', tf.' not in text[-60:] else f'({text})'}",
            scope,
        ),
        input_signature=signature,
    )
    model, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=18)
    return _product(model.SerializeToString(), shapes, lambda arrays: function(*arrays))


def _loop(tf: Any) -> Callable[[Any], Any]:
    """A loop over a TensorArray, as autograph writes it."""

    def function(x: Any) -> Any:
        states = tf.TensorArray(tf.float32, size=5)

        def body(i: Any, a: Any, states: Any) -> Any:
            a = tf.tanh(a + x[:, i])
            return i + 1, a, states.write(i, a)

        found = tf.while_loop(lambda i, *_: i < 5, body, (0, x[:, 0], states))
        return found[2].stack()

    return function


def _product(model: bytes, shapes: Any, answer: Callable[[Sequence[np.ndarray]], Any]) -> Product:
    """``model`` with cases; without those that TensorFlow does not run."""
    declared = onnx.load_from_string(model).graph.input
    rows = {"batch": 8} if any(s[0] == "fixed" for s in _specifications(shapes)) else ROWS
    cases = {}
    for case, count in rows.items():
        arrays = _feeds(shapes, count)
        feeds: Feeds = {
            value.name: arrays[int(value.name[1]) if len(arrays) > 1 else 0] for value in declared
        }
        outputs = answer(arrays)
        cases[case] = Case(feeds, _arrays(outputs))
    return Product(model, cases)


def _arrays(outputs: Any) -> list[Any]:
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [array for output in outputs for array in _arrays(output)]
    return [np.asarray(outputs)]


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
