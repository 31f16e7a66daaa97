"""Small torch modules, one module or function of torch each, by both exporters.

A batch is of 16 rows. Sizes are those of small networks, and of larger ones ("large") where an
operation is often slow on much data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.zoo import torch_export
from bench.zoo.store import Recipe
from bench.zoo.torch_export import Feed, Network, fixed, flags, normal, positive, whole

BATCH = 16
IMAGE, SIGNAL, VECTOR, TOKENS = (8, 24, 24), (8, 64), (64,), (16, 64)
Part = tuple[Callable[[], Any], list[Feed]]


def recipes(_: str) -> Iterator[Recipe]:
    tables = (
        _layers(), _activations(), _elementwise(), _reductions(), _shapes(), _indices(), _images(),
        _products(), _recurrent(), _attention(), _large(),
    )  # fmt: skip
    networks = [
        Network(name, build, feeds, (1, BATCH))
        for table in tables
        for name, (build, feeds) in table.items()
    ]
    yield from torch_export.recipes(networks)


def _module(name: str, *arguments: Any, on: Any, **keywords: Any) -> Part:
    """A module of torch.nn, on an input of that shape, or on a list of inputs."""

    def build() -> Any:
        import torch

        module = getattr(torch.nn, name)(*arguments, **keywords)
        # Statistics and parameters of normalizations are zeros and ones when made.
        for parameter in [*module.parameters(), *module.buffers()]:
            if parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all():
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return module

    return build, on if isinstance(on, list) else [normal(*on)]


def _function(function: Callable[..., Any], *feeds: Feed) -> Part:
    return (lambda: torch_export.function_module()(function)), list(feeds)


def _torch(name: str, *feeds: Feed, **keywords: Any) -> Part:
    """A function of torch, such as "cumsum" or "nn.functional.pad"."""

    def call(*inputs: Any) -> Any:
        import torch

        function: Any = torch
        for part in name.split("."):
            function = getattr(function, part)
        return function(*inputs, **keywords)

    return _function(call, *feeds)


def _layers() -> dict[str, Part]:
    m = _module
    return {
        "Conv1d": m("Conv1d", 8, 16, 3, padding=1, on=SIGNAL),
        "Conv1d_dilated": m("Conv1d", 8, 16, 3, dilation=4, padding=4, on=SIGNAL),
        "Conv2d": m("Conv2d", 8, 16, 3, padding=1, on=IMAGE),
        "Conv2d_1x1": m("Conv2d", 8, 32, 1, on=IMAGE),
        "Conv2d_strided": m("Conv2d", 8, 16, 3, stride=2, padding=1, on=IMAGE),
        "Conv2d_depthwise": m("Conv2d", 8, 8, 3, groups=8, padding=1, on=IMAGE),
        "Conv2d_depthwise5": m("Conv2d", 8, 8, 5, groups=8, padding=2, on=IMAGE),
        "Conv2d_groups": m("Conv2d", 8, 16, 3, groups=4, on=IMAGE),
        "Conv2d_dilated": m("Conv2d", 8, 16, 3, dilation=2, padding=2, on=IMAGE),
        "Conv2d_same": m("Conv2d", 8, 16, 3, padding="same", on=IMAGE),
        "Conv2d_reflect": m("Conv2d", 8, 16, 3, padding=1, padding_mode="reflect", on=IMAGE),
        "Conv2d_circular": m("Conv2d", 8, 16, 3, padding=1, padding_mode="circular", on=IMAGE),
        "Conv3d": m("Conv3d", 4, 8, 3, padding=1, on=(4, 8, 12, 12)),
        "ConvTranspose1d": m("ConvTranspose1d", 8, 16, 4, stride=2, padding=1, on=SIGNAL),
        "ConvTranspose2d": m("ConvTranspose2d", 8, 16, 3, stride=2, padding=1, on=IMAGE),
        "ConvTranspose2d_output_padding": m("ConvTranspose2d", 8, 16, 3, 2, 1, 1, on=IMAGE),
        "ConvTranspose2d_groups": m("ConvTranspose2d", 8, 8, 4, 2, 1, groups=8, on=IMAGE),
        "ConvTranspose3d": m("ConvTranspose3d", 4, 8, 2, stride=2, on=(4, 6, 8, 8)),
        "Linear": m("Linear", 64, 128, on=VECTOR),
        "Linear_no_bias": m("Linear", 64, 128, bias=False, on=VECTOR),
        "Linear_tokens": m("Linear", 64, 128, on=TOKENS),
        "Bilinear": m("Bilinear", 16, 24, 8, on=[normal(16), normal(24)]),
        "Embedding": m("Embedding", 100, 32, on=[whole(100, 20)]),
        "EmbeddingBag": m("EmbeddingBag", 100, 32, mode="sum", on=[whole(100, 20)]),
        "MaxPool1d": m("MaxPool1d", 3, 2, on=SIGNAL),
        "MaxPool2d": m("MaxPool2d", 3, 2, 1, on=IMAGE),
        "MaxPool2d_ceil": m("MaxPool2d", 3, 2, ceil_mode=True, on=IMAGE),
        "MaxPool2d_indices": m("MaxPool2d", 2, return_indices=True, on=IMAGE),
        "MaxPool3d": m("MaxPool3d", 2, on=(4, 8, 12, 12)),
        "AvgPool1d": m("AvgPool1d", 3, 2, on=SIGNAL),
        "AvgPool2d": m("AvgPool2d", 3, 2, 1, on=IMAGE),
        "AvgPool2d_ceil": m("AvgPool2d", 3, 2, ceil_mode=True, on=IMAGE),
        "AvgPool2d_exclude": m("AvgPool2d", 3, 2, 1, count_include_pad=False, on=IMAGE),
        "AvgPool3d": m("AvgPool3d", 2, on=(4, 8, 12, 12)),
        "LPPool2d": m("LPPool2d", 2, 3, 2, on=IMAGE),
        "AdaptiveAvgPool2d": m("AdaptiveAvgPool2d", 1, on=IMAGE),
        "AdaptiveAvgPool2d_6": m("AdaptiveAvgPool2d", 6, on=IMAGE),
        "AdaptiveAvgPool1d": m("AdaptiveAvgPool1d", 8, on=SIGNAL),
        "AdaptiveMaxPool2d": m("AdaptiveMaxPool2d", 1, on=IMAGE),
        "AdaptiveMaxPool2d_6": m("AdaptiveMaxPool2d", 6, on=IMAGE),
        "BatchNorm1d": m("BatchNorm1d", 64, on=VECTOR),
        "BatchNorm2d": m("BatchNorm2d", 8, on=IMAGE),
        "BatchNorm3d": m("BatchNorm3d", 4, on=(4, 8, 12, 12)),
        "InstanceNorm1d": m("InstanceNorm1d", 8, affine=True, on=SIGNAL),
        "InstanceNorm2d": m("InstanceNorm2d", 8, affine=True, on=IMAGE),
        "InstanceNorm2d_plain": m("InstanceNorm2d", 8, on=IMAGE),
        "LayerNorm": m("LayerNorm", 64, on=TOKENS),
        "LayerNorm_image": m("LayerNorm", IMAGE, on=IMAGE),
        "LayerNorm_plain": m("LayerNorm", 64, elementwise_affine=False, on=TOKENS),
        "GroupNorm": m("GroupNorm", 4, 8, on=IMAGE),
        "RMSNorm": m("RMSNorm", 64, on=TOKENS),
        "LocalResponseNorm": m("LocalResponseNorm", 3, on=IMAGE),
        "Dropout": m("Dropout", on=VECTOR),
        "Flatten": m("Flatten", on=IMAGE),
        "Unflatten": m("Unflatten", 1, (8, 8), on=VECTOR),
        "Fold": m("Fold", (8, 8), 2, stride=2, on=(12, 16)),
        "Unfold": m("Unfold", 3, padding=1, on=IMAGE),
        "PixelShuffle": m("PixelShuffle", 2, on=IMAGE),
        "PixelUnshuffle": m("PixelUnshuffle", 2, on=IMAGE),
        "ChannelShuffle": m("ChannelShuffle", 4, on=IMAGE),
        "ZeroPad2d": m("ZeroPad2d", 2, on=IMAGE),
        "ReflectionPad2d": m("ReflectionPad2d", 2, on=IMAGE),
        "ReplicationPad2d": m("ReplicationPad2d", 2, on=IMAGE),
        "CircularPad2d": m("CircularPad2d", 2, on=IMAGE),
        "ConstantPad1d": m("ConstantPad1d", 2, 0.5, on=SIGNAL),
        "CosineSimilarity": m("CosineSimilarity", on=[normal(64), normal(64)]),
        "PairwiseDistance": m("PairwiseDistance", on=[normal(64), normal(64)]),
        "CrossEntropyLoss": m("CrossEntropyLoss", on=[normal(10), whole(10)]),
        "MSELoss": m("MSELoss", on=[normal(64), normal(64)]),
        "SmoothL1Loss": m("SmoothL1Loss", on=[normal(64), normal(64)]),
        "BCEWithLogitsLoss": m("BCEWithLogitsLoss", on=[normal(64), positive(64)]),
        "KLDivLoss": m("KLDivLoss", on=[normal(64), positive(64)]),
    }


def _activations() -> dict[str, Part]:
    names = (
        "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid",
        "Tanh", "Softplus", "Softsign", "Softshrink", "Hardshrink", "Hardsigmoid", "Hardswish",
        "Hardtanh", "LogSigmoid", "Tanhshrink", "PReLU",
    )  # fmt: skip
    table = {name: _module(name, on=IMAGE) for name in names}
    return table | {
        "GELU_tanh": _module("GELU", approximate="tanh", on=TOKENS),
        "PReLU_channels": _module("PReLU", 8, on=IMAGE),
        "Threshold": _module("Threshold", 0.1, 0.5, on=IMAGE),
        "GLU": _module("GLU", on=VECTOR),
        "Softmax": _module("Softmax", -1, on=TOKENS),
        "Softmax_channels": _module("Softmax", 1, on=IMAGE),
        "LogSoftmax": _module("LogSoftmax", -1, on=VECTOR),
        "Softmin": _module("Softmin", -1, on=VECTOR),
        "Softmax2d": _module("Softmax2d", on=IMAGE),
    }


def _elementwise() -> dict[str, Part]:
    one = ("abs", "neg", "exp", "sin", "cos", "tan", "atan", "sinh", "erf", "ceil", "floor", "sign",
           "round", "square", "isnan", "isinf", "expm1", "logit")  # fmt: skip
    of_positive = ("sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal", "asin", "acos", "atanh", "frac", "trunc")  # fmt: skip
    two = ("add", "sub", "mul", "maximum", "minimum", "gt", "le", "eq", "atan2", "fmod", "remainder")  # fmt: skip
    x, y = normal(8, 64), normal(8, 64)
    table = {name: _torch(name, x) for name in one}
    table |= {name: _torch(name, positive(8, 64)) for name in of_positive}
    table |= {name: _torch(name, x, y) for name in two}
    integers = whole(50, 64), whole(50, 64)
    return table | {
        "div": _torch("div", x, positive(8, 64)),
        "div_floor": _torch("div", x, positive(8, 64), rounding_mode="floor"),
        "pow": _torch("pow", positive(8, 64), y),
        "pow_3": _function(lambda a: a**3, x),
        "clamp": _torch("clamp", x, min=-0.5, max=0.5),
        "where": _torch("where", flags(8, 64), x, y),
        "masked_fill": _function(lambda a, m: a.masked_fill(m, -1e9), x, flags(8, 64)),
        "lerp": _torch("lerp", x, y, weight=0.3),
        "addcmul": _torch("addcmul", x, y, positive(8, 64)),
        "logical_and": _torch("logical_and", flags(64), flags(64)),
        "bitwise_and": _torch("bitwise_and", *integers),
        "int_add": _torch("add", *integers),
        "int_mul": _torch("mul", *integers),
        "int_floor_div": _function(lambda a, b: a // (b + 1), *integers),
        "int_remainder": _function(lambda a, b: a % (b + 1), *integers),
        "add_broadcast": _torch("add", normal(8, 1, 24), normal(1, 24, 1)),
        "cast_int": _function(lambda a: a.long(), x),
        "cast_half": _function(lambda a: (a.half() * 2).float(), x),
        "full_like": _function(lambda a: a.new_full(a.shape, 2.0) + a, x),
        "nan_to_num": _torch("nan_to_num", x),
        "logaddexp": _torch("logaddexp", x, y),
        "hypot": _torch("hypot", x, y),
    }


def _reductions() -> dict[str, Part]:
    x, image = normal(8, 64), normal(*IMAGE)
    names = ("sum", "mean", "amax", "amin", "prod", "logsumexp", "std", "var", "argmax", "argmin",
             "cumsum", "cumprod", "any", "all")  # fmt: skip
    table = {name: _torch(name, x, dim=-1) for name in names if name not in ("any", "all")}
    return table | {
        "any": _torch("any", flags(8, 64), dim=-1),
        "all": _torch("all", flags(8, 64), dim=-1),
        "mean_image": _function(lambda a: a.mean((2, 3)), image),
        "mean_channels": _function(lambda a: a.mean(1, keepdim=True), image),
        "sum_all": _function(lambda a: a.sum(), x),
        "max_dim": _function(lambda a: a.max(1), x),
        "min_dim": _function(lambda a: a.min(1), x),
        "norm": _function(lambda a: a.norm(dim=-1), x),
        "norm_1": _function(lambda a: a.norm(p=1, dim=-1), x),
        "normalize": _torch("nn.functional.normalize", x, dim=-1),
        "topk": _torch("topk", x, k=5),
        "sort": _torch("sort", x),
        "argsort": _torch("argsort", x),
        "cumsum_int": _torch("cumsum", whole(9, 64), dim=1),
        "median": _function(lambda a: a.median(-1)[0], x),
        "count_nonzero": _function(lambda a: (a > 0).sum(1), x),
        "softmax_weighted": _function(lambda a: (a.softmax(-1) * a).sum(-1), x),
        "cummax": _function(lambda a: a.cummax(1)[0], x),
    }


def _shapes() -> dict[str, Part]:
    x, y, tokens = normal(8, 64), normal(8, 64), normal(*TOKENS)
    f = _function
    return {
        "reshape": f(lambda a: a.reshape(a.shape[0], -1, 16), x),
        "view_flat": f(lambda a: a.flatten(1), x),
        "permute": f(lambda a: a.permute(0, 2, 1) * 1.0, x),
        "permute_heads": f(lambda a: a.view(a.shape[0], 16, 4, 16).permute(0, 2, 1, 3), tokens),
        "permute_nhwc": f(lambda a: a.permute(0, 2, 3, 1).contiguous(), normal(*IMAGE)),
        "transpose": f(lambda a: a.transpose(1, 2), x),
        "squeeze": f(lambda a: a.unsqueeze(2).squeeze(2), x),
        "expand": f(lambda a: a[:, :, :1].expand(-1, -1, 32) + 1, x),
        "repeat": f(lambda a: a.repeat(1, 2, 1), x),
        "repeat_interleave": f(lambda a: a.repeat_interleave(2, dim=1), x),
        "tile": f(lambda a: a.tile((1, 1, 2)), x),
        "cat": f(lambda a, b: a.new_tensor(0) + _cat([a, b], 1), x, y),
        "cat_last": f(lambda a, b: _cat([a, b], -1), x, y),
        "stack": f(lambda a, b: _stack([a, b], 1), x, y),
        "split": f(lambda a: a.split(16, -1), x),
        "chunk": f(lambda a: a.chunk(2, 1), x),
        "unbind": f(lambda a: a.unbind(1), x),
        "slice": f(lambda a: a[:, 1:7, ::2], x),
        "slice_negative": f(lambda a: a[..., -8:], x),
        "select": f(lambda a: a[:, 0], x),
        "flip": _torch("flip", x, dims=[-1]),
        "roll": _torch("roll", normal(*IMAGE), shifts=(3, 3), dims=(2, 3)),
        "tril": _torch("tril", normal(24, 24)),
        "triu": _torch("triu", normal(24, 24), diagonal=1),
        "diagonal": f(lambda a: a.diagonal(dim1=1, dim2=2), normal(24, 24)),
        "pad": _torch("nn.functional.pad", x, pad=(1, 2)),
        "pad_negative": _torch("nn.functional.pad", x, pad=(-1, -2)),
        "movedim": _torch("movedim", normal(*IMAGE), source=1, destination=-1),
        "unfold_dim": f(lambda a: a.unfold(2, 8, 4), x),
        "arange_mask": f(lambda a: a * (a.new_ones(64).cumsum(0) < 30), x),
        "meshgrid": _torch("meshgrid", fixed(np.arange(8.0)), fixed(np.arange(4.0)), indexing="ij"),
        "rot90": _torch("rot90", normal(*IMAGE), dims=(2, 3)),
        "space_to_depth": f(
            lambda a: a.view(-1, 8, 12, 2, 12, 2).permute(0, 3, 5, 1, 2, 4).reshape(-1, 32, 12, 12),
            normal(*IMAGE),
        ),
        "windows": f(
            lambda a: a.view(-1, 8, 4, 6, 4, 6).permute(0, 2, 4, 3, 5, 1).reshape(-1, 36, 8),
            normal(*IMAGE),
        ),
    }


def _cat(tensors: list, dim: int) -> Any:
    import torch

    return torch.cat(tensors, dim)


def _stack(tensors: list, dim: int) -> Any:
    import torch

    return torch.stack(tensors, dim)


def _one_hot(a: Any) -> Any:
    import torch

    return torch.nn.functional.one_hot(a, 12)


def _indices() -> dict[str, Part]:
    x = normal(8, 64)
    f = _function
    rows = fixed(np.array([3, 1, 5]))
    return {
        "gather": f(lambda a, i: a.gather(2, i), x, whole(64, 8, 12)),
        "gather_first": f(lambda a, i: a.gather(1, i), x, whole(8, 3, 64)),
        "index_select": f(lambda a, i: a.index_select(1, i), x, rows),
        "index": f(lambda a, i: a[:, i], x, rows),
        "index_pair": f(lambda a, i: a[:, i, i], x, rows),
        "index_batch": f(lambda a, i: a[a.new_ones(a.shape[0]).cumsum(0).long() - 1, i], x, whole(8)),
        "index_put": f(lambda a, i: a.index_put((i * 0, i), a[0, :3] * 0 + 1), normal(64), fixed(np.array([0, 2, 1]))),
        "index_add": f(lambda a, i: a.index_add(1, i, a[:, :3] * 2), x, rows),
        "scatter": f(lambda a, i: a.scatter(2, i, 0.5), x, whole(64, 8, 4)),
        "scatter_add": f(lambda a, i, b: a.scatter_add(2, i, b), x, whole(64, 8, 12), normal(8, 12)),
        "scatter_reduce": f(lambda a, i, b: a.scatter_reduce(2, i, b, "amax"), x, whole(64, 8, 12), normal(8, 12)),
        "take_along_dim": _torch("take_along_dim", x, whole(8, 2, 64), dim=1),
        "masked_select": f(lambda a, m: a[m], x, flags(8, 64)),
        "nonzero": f(lambda a: (a > 0.5).nonzero(), x),
        "one_hot": f(_one_hot, whole(12, 7)),
        "embedding_sum": f(lambda a, i: a[:, i].sum(2), x, fixed(np.array([[1, 2], [0, 7]]))),
        "bucketize": _torch("bucketize", x, fixed(np.linspace(-2, 2, 9, dtype=np.float32))),
        "slice_assign": f(_assigned, x),
        "bincount_like": f(lambda i: _one_hot(i).sum(1), whole(12, 30)),
    }  # fmt: skip


def _assigned(a: Any) -> Any:
    b = a.clone()
    b[:, 1:3, ::2] = 0.0
    return b


def _images() -> dict[str, Part]:
    image, tall = normal(*IMAGE), normal(3, 32, 32)
    f = "nn.functional."
    table = {
        f"interpolate_{mode}": _torch(f + "interpolate", image, scale_factor=2.0, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact")
    }
    return table | {
        "interpolate_corners": _torch(f + "interpolate", image, size=(40, 40), mode="bilinear", align_corners=True),
        "interpolate_down": _torch(f + "interpolate", image, scale_factor=0.5, mode="bilinear"),
        "interpolate_antialias": _torch(f + "interpolate", image, size=(11, 11), mode="bilinear", antialias=True),
        "interpolate_linear": _torch(f + "interpolate", normal(*SIGNAL), scale_factor=2.0, mode="linear"),
        "interpolate_area": _torch(f + "interpolate", image, size=(8, 8), mode="area"),
        "Upsample_nearest": _module("Upsample", scale_factor=2, on=IMAGE),
        "grid_sample": _torch(f + "grid_sample", image, _grid(12), align_corners=False),
        "grid_sample_border": _torch(f + "grid_sample", image, _grid(12), align_corners=True, padding_mode="border"),
        "grid_sample_nearest": _torch(f + "grid_sample", image, _grid(12), mode="nearest", align_corners=False),
        "affine_grid": _function(_affine, tall),
        "image_normalize": _function(lambda a: (a - 0.45) / 0.225, tall),
        "image_bytes": _function(lambda a: (a.float() / 255 - 0.5).permute(0, 3, 1, 2), whole(256, 32, 32, 3, dtype=np.uint8)),
        "nms": _function(_nms, positive(4)),
        "roi_align": _function(_roi_align, image),
    }  # fmt: skip


def _grid(size: int) -> Feed:
    return Feed(
        lambda rng, rows: (rng.random((rows, size, size, 2)) * 2.2 - 1.1).astype(np.float32)
    )


def _affine(a: Any) -> Any:
    import torch

    theta = torch.tensor([[[0.8, 0.1, 0.0], [-0.1, 0.9, 0.2]]]).expand(a.shape[0], 2, 3)
    grid = torch.nn.functional.affine_grid(theta, [16, 3, 24, 24], align_corners=False)
    return torch.nn.functional.grid_sample(a, grid, align_corners=False)


def _nms(a: Any) -> Any:
    import torchvision

    corners = _cat([a[:, :2], a[:, :2] + a[:, 2:] + 0.1], 1)
    return torchvision.ops.nms(corners, a[:, 0], 0.4)


def _roi_align(a: Any) -> Any:
    import torch
    import torchvision

    boxes = torch.tensor([[0, 1.0, 2.0, 10.0, 12.0], [0, 3.0, 3.0, 20.0, 17.0]])
    return torchvision.ops.roi_align(a, boxes, (7, 7), 0.5, 2)


def _products() -> dict[str, Part]:
    x, t = normal(*TOKENS), normal(64, 16)
    return {
        "matmul": _torch("matmul", x, t),
        "matmul_heads": _torch("matmul", normal(4, 16, 32), normal(4, 32, 16)),
        "matmul_vector": _function(lambda a: a @ a.new_ones(64), x),
        "matmul_transposed": _function(lambda a: a @ a.transpose(1, 2), x),
        "bmm": _torch("bmm", x, t),
        "baddbmm": _torch("baddbmm", normal(16, 16), x, t),
        "addmm": _torch("addmm", normal(32), normal(64), fixed(_weights(64, 32))),
        "einsum_heads": _function(lambda a, b: _einsum("bhid,bhjd->bhij", a, b), normal(4, 16, 32), normal(4, 16, 32)),
        "einsum_outer": _function(lambda a, b: _einsum("bi,bj->bij", a, b), normal(24), normal(24)),
        "einsum_sum": _function(lambda a: _einsum("bij->bj", a), x),
        "int_matmul": _function(lambda a, b: a @ b, whole(9, 8, 16), whole(9, 16, 8)),
        "outer_sum": _function(lambda a: a[:, :, None] + a[:, None, :], normal(32)),
        "cdist": _torch("cdist", normal(8, 16), normal(12, 16)),
        "linalg_det": _torch("linalg.det", normal(4, 4)),
        "inverse": _torch("inverse", normal(4, 4)),
        "linalg_norm": _function(lambda a: (a * a).sum(-1).sqrt(), x),
        "cross": _torch("linalg.cross", normal(8, 3), normal(8, 3)),
        "stft": _function(_stft, normal(800)),
        "fft_rfft": _function(lambda a: _rfft(a), normal(64)),
        "mlp": (_mlp, [normal(*VECTOR)]),
        "mlp_residual": (_residual, [normal(*TOKENS)]),
    }  # fmt: skip


def _weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _einsum(*arguments: Any) -> Any:
    import torch

    return torch.einsum(*arguments)


def _stft(a: Any) -> Any:
    import torch

    window = torch.hann_window(200)
    return torch.view_as_real(torch.stft(a, 200, 80, window=window, return_complex=True))


def _rfft(a: Any) -> Any:
    import torch

    return torch.view_as_real(torch.fft.rfft(a))


def _mlp() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.GELU(),
        nn.Linear(32, 10),
        nn.Softmax(-1),
    )


def _residual() -> Any:
    from torch import nn

    inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    return Residual()


def _recurrent() -> dict[str, Part]:
    on = [normal(12, 32)]
    table = {}
    for name in ("LSTM", "GRU", "RNN"):
        table[name] = _module(name, 32, 48, batch_first=True, on=on)
        table[f"{name}_bidirectional"] = _module(
            name, 32, 48, batch_first=True, bidirectional=True, on=on
        )
        table[f"{name}_layers"] = _module(name, 32, 48, num_layers=2, batch_first=True, on=on)
        table[f"{name}Cell"] = _module(f"{name}Cell", 32, 48, on=[normal(32)])
    table["LSTM_projected"] = _module("LSTM", 32, 48, proj_size=16, batch_first=True, on=on)
    table["RNN_relu"] = _module("RNN", 32, 48, nonlinearity="relu", batch_first=True, on=on)
    return table


def _attention() -> dict[str, Part]:
    heads = [normal(4, 16, 32)] * 3
    f = "nn.functional.scaled_dot_product_attention"
    layer = partial(_module, on=[normal(16, 64)])
    sizes = {"d_model": 64, "nhead": 4, "dim_feedforward": 128, "batch_first": True}
    return {
        "attention": _torch(f, *heads),
        "attention_causal": _torch(f, *heads, is_causal=True),
        "attention_mask": _torch(f, *heads, flags(4, 16, 16)),
        "attention_bias": _torch(f, *heads, normal(4, 16, 16)),
        "MultiheadAttention": (_self_attention, [normal(16, 64)]),
        "TransformerEncoderLayer": layer("TransformerEncoderLayer", **sizes),
        "TransformerEncoderLayer_pre": layer(
            "TransformerEncoderLayer", **sizes, norm_first=True, activation="gelu"
        ),
        "TransformerDecoderLayer": _module(
            "TransformerDecoderLayer", **sizes, on=[normal(16, 64), normal(12, 64)]
        ),
        "Transformer": _module(
            "Transformer", num_encoder_layers=1, num_decoder_layers=1, **sizes,
            on=[normal(16, 64), normal(12, 64)],
        ),
    }  # fmt: skip


def _self_attention() -> Any:
    from torch import nn

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.inner(x, x, x)

    return SelfAttention()


def _large() -> dict[str, Part]:
    image = normal(32, 64, 64)
    f = "nn.functional."
    table = {
        "cumsum": _torch("cumsum", normal(256, 64), dim=1),
        "interpolate_nearest": _torch(f + "interpolate", image, scale_factor=2.0),
        "interpolate_bilinear": _torch(f + "interpolate", image, scale_factor=2.0, mode="bilinear"),
        "InstanceNorm2d": _module("InstanceNorm2d", 32, affine=True, on=(32, 64, 64)),
        "GroupNorm": _module("GroupNorm", 8, 32, on=(32, 64, 64)),
        "LayerNorm": _module("LayerNorm", 384, on=(128, 384)),
        "permute_nhwc": _function(lambda a: a.permute(0, 2, 3, 1).contiguous(), image),
        "grid_sample": _torch(f + "grid_sample", image, _grid(64), align_corners=False),
        "scatter_add": _function(
            lambda a, i, b: a.scatter_add(1, i, b), normal(256), whole(256, 1000), normal(1000)
        ),
        "gather": _function(lambda a, i: a.gather(1, i), normal(1000), whole(1000, 4000)),
        "ConvTranspose2d": _module("ConvTranspose2d", 32, 16, 4, 2, 1, on=(32, 32, 32)),
        "Conv2d": _module("Conv2d", 32, 64, 3, padding=1, on=(32, 32, 32)),
        "Conv2d_depthwise5": _module("Conv2d", 32, 32, 5, groups=32, padding=2, on=(32, 64, 64)),
        "Linear": _module("Linear", 384, 1536, on=(64, 384)),
        "GELU": _module("GELU", on=(64, 1536)),
        "Softmax": _module("Softmax", -1, on=(4, 128, 128)),
        "MaxPool2d": _module("MaxPool2d", 3, 2, 1, on=(32, 64, 64)),
        "add": _torch("add", image, image),
        "mean_image": _function(lambda a: a.mean((2, 3)), image),
        "topk": _torch("topk", normal(4000), k=100),
        "embedding": _module("Embedding", 5000, 128, on=[whole(5000, 128)]),
        "LSTM": _module("LSTM", 128, 128, batch_first=True, on=[normal(64, 128)]),
        "attention": _torch(f + "scaled_dot_product_attention", *[normal(6, 128, 64)] * 3),
        "cat": _function(lambda a, b: _cat([a, b], 1), image, image),
    }
    return {f"large_{name}": part for name, part in table.items()}
