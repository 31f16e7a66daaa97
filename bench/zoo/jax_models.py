"""Functions of JAX, and modules of Flax and Equinox, as jax2onnx writes them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx

from bench.zoo.store import Case, Product, Recipe

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS = {"row": 1, "batch": 8}
ROW, SIGNAL, IMAGE = (32,), (20, 8), (16, 16, 4)

# What is called, written with jax, jnp, lax, nn, nnx, rngs, eqx and key, and the shapes of what it
# takes for one row; ("int32", below, ...) are whole numbers.
FUNCTIONS: dict[str, tuple[str, Any]] = {
    **{f"jnp_{name}": (f"jnp.{name}", SIGNAL) for name in (
        "abs", "arccos", "arcsinh", "arctan", "cbrt", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor",
        "isfinite", "isnan", "log1p", "log2", "logical_not", "negative", "rint", "sign", "signbit", "sin",
        "sinc", "sqrt", "square", "tan", "tanh", "trunc", "nan_to_num", "ravel", "fliplr", "transpose",
    )},
    **{f"jnp_{name}": (f"jnp.{name}", [SIGNAL, SIGNAL]) for name in (
        "add", "arctan2", "divide", "equal", "floor_divide", "fmod", "greater", "hypot", "logaddexp", "maximum",
        "minimum", "multiply", "power", "remainder", "subtract", "copysign",
    )},
    **{f"nn_{name}": (f"jax.nn.{name}", SIGNAL) for name in (
        "celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu", "log_sigmoid",
        "log_softmax", "logsumexp", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax",
        "softplus", "standardize",
    )},
    "all": ("lambda x: jnp.all(x > -2, axis=1)", SIGNAL),
    "argmax": ("lambda x: jnp.argmax(x, axis=1)", SIGNAL),
    "argsort": ("lambda x: jnp.argsort(x, axis=-1)", SIGNAL),
    "clip": ("lambda x: jnp.clip(x, -1, 0.5)", SIGNAL),
    "concatenate": ("lambda x, y: jnp.concatenate([x, y], 1)", [SIGNAL, SIGNAL]),
    "cond": ("lambda x: lax.cond(jnp.sum(x) > 0, lambda a: a * 2, lambda a: a - 1, x)", SIGNAL),
    "conv": ("lambda x: lax.conv_general_dilated(x, jnp.ones((3, 3, 4, 6)), (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))", IMAGE),
    "cumsum": ("lambda x: jnp.cumsum(x, axis=1)", SIGNAL),
    "cumprod": ("lambda x: jnp.cumprod(x * 0.5 + 1, axis=1)", SIGNAL),
    "cummax": ("lambda x: lax.cummax(x, axis=1)", SIGNAL),
    "dynamic_slice": ("lambda x: lax.dynamic_slice_in_dim(x, jnp.argmax(x[0, :, 0]) // 4, 3, 1)", SIGNAL),
    "einsum_attention": ("lambda x, y: jnp.einsum('bic,bjc->bij', x, y)", [SIGNAL, SIGNAL]),
    "einsum_batched": ("lambda x, y: jnp.einsum('bic,bid->bcd', x, y)", [SIGNAL, (20, 5)]),
    "erf": ("jax.scipy.special.erf", SIGNAL),
    "fft": ("lambda x: jnp.abs(jnp.fft.rfft(x))", (64,)),
    "fori_loop": ("lambda x: lax.fori_loop(0, 5, lambda i, a: jnp.tanh(a * 1.5), x)", SIGNAL),
    "gather": ("lambda x: x[:, jnp.array([3, 0, 2])]", SIGNAL),
    "gather_nd": ("lambda x: x[:, jnp.array([3, 0, 2]), jnp.array([1, 1, 5])]", SIGNAL),
    "matmul": ("jnp.matmul", [SIGNAL, (8, 6)]),
    "mean_std": ("lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)", SIGNAL),
    "median": ("lambda x: jnp.median(x, axis=1)", SIGNAL),
    "one_hot": ("lambda x: jax.nn.one_hot(x, 12)", ("int32", 12, 6)),
    "outer": ("lambda x: x[:, :, None] * x[:, None, :]", ROW),
    "pad": ("lambda x: jnp.pad(x, ((0, 0), (1, 2), (3, 0)), constant_values=1.5)", SIGNAL),
    "pad_reflect": ("lambda x: jnp.pad(x, ((0, 0), (1, 2), (3, 0)), mode='reflect')", SIGNAL),
    "prod": ("lambda x: jnp.prod(x, axis=(1, 2))", (4, 3)),
    "reduce_max_min": ("lambda x: (jnp.max(x, 1), jnp.min(x, 2, keepdims=True))", SIGNAL),
    "repeat_tile": ("lambda x: jnp.tile(jnp.repeat(x, 2, axis=1), (1, 1, 3))", SIGNAL),
    "resize": ("lambda x: jax.image.resize(x, (x.shape[0], 24, 10, 4), 'bilinear')", IMAGE),
    "roll": ("lambda x: jnp.roll(x, 3, axis=1)", SIGNAL),
    "rope": ("lambda x: (lambda a, c, s: jnp.concatenate([a[..., :4] * c - a[..., 4:] * s, a[..., 4:] * c + a[..., :4] * s], -1))(x, jnp.cos(jnp.arange(20.0))[:, None], jnp.sin(jnp.arange(20.0))[:, None])", SIGNAL),
    "scan": ("lambda x: lax.scan(lambda a, b: (jnp.tanh(a + b), a), jnp.zeros((x.shape[0], 8)), jnp.swapaxes(x, 0, 1))", SIGNAL),
    "scatter_set": ("lambda x: x.at[:, 2].set(0.5)", SIGNAL),
    "scatter_add": ("lambda x: x.at[:, jnp.array([1, 1, 4])].add(2.0)", SIGNAL),
    "segment_sum": ("lambda x: jax.ops.segment_sum(x.T, jnp.arange(32) % 5, 5)", ROW),
    "select": ("lambda x, y: jnp.where(x > y, x, 0.1 * y)", [SIGNAL, SIGNAL]),
    "slice_stride": ("lambda x: x[:, 1:-2:3, ::-1]", SIGNAL),
    "sort": ("lambda x: jnp.sort(x, axis=1)", SIGNAL),
    "split_stack": ("lambda x: jnp.stack(jnp.split(x, 4, axis=1), axis=2)", SIGNAL),
    "squeeze": ("lambda x: jnp.squeeze(x[:, :1], 1)", SIGNAL),
    "switch": ("lambda x: lax.switch(1, [lambda a: a, lambda a: a + 1], x)", SIGNAL),
    "take_along_axis": ("lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1)[:, :3], 1)", SIGNAL),
    "top_k": ("lambda x: lax.top_k(x, 3)", SIGNAL),
    "tri": ("lambda x: (jnp.tril(x), jnp.triu(x, 1))", (6, 6)),
    "var": ("lambda x: jnp.var(x, axis=(1, 2))", SIGNAL),
    "vmap": ("lambda x: jax.vmap(lambda a: a @ a.T)(x)", SIGNAL),
    "while_loop": ("lambda x: lax.while_loop(lambda a: jnp.max(a) > 0.01, lambda a: a * 0.5, x)", SIGNAL),
    "linalg_norm": ("lambda x: jnp.linalg.norm(x, axis=-1)", SIGNAL),
    "linalg_det": ("jnp.linalg.det", (4, 4)),
    "attention": ("lambda x: jax.nn.dot_product_attention(x.reshape(x.shape[0], 20, 2, 4), x.reshape(x.shape[0], 20, 2, 4), x.reshape(x.shape[0], 20, 2, 4))", SIGNAL),
    "attention_causal": ("lambda x: jax.nn.dot_product_attention(*[x.reshape(x.shape[0], 20, 2, 4)] * 3, is_causal=True)", SIGNAL),
    "grad_mlp": ("jax.grad(lambda x: jnp.sum(jnp.tanh(x @ jnp.full((32, 8), 0.1)) ** 2))", ROW),
    "int_bits": ("lambda x: (x & 7) | (x >> 2) ^ (x << 1)", ("int32", 60, 9)),
    "int_division": ("lambda x: ((x - 20) // 7, (x - 20) % 7)", ("int32", 60, 9)),
    "bfloat16": ("lambda x: jnp.tanh(x.astype(jnp.bfloat16) * 2).astype(jnp.float32)", SIGNAL),
    "float16": ("lambda x: jax.nn.softmax(x.astype(jnp.float16)).astype(jnp.float32)", SIGNAL),
    "nnx_Linear": ("nnx.Linear(32, 16, rngs=rngs)", ROW),
    "nnx_Conv": ("nnx.Conv(4, 8, (3, 3), rngs=rngs)", IMAGE),
    "nnx_Conv_stride": ("nnx.Conv(4, 8, (3, 3), strides=2, padding='VALID', rngs=rngs)", IMAGE),
    "nnx_Conv_depthwise": ("nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)", IMAGE),
    "nnx_ConvTranspose": ("nnx.ConvTranspose(4, 6, (3, 3), strides=2, rngs=rngs)", IMAGE),
    "nnx_BatchNorm": ("nnx.BatchNorm(4, use_running_average=True, rngs=rngs)", IMAGE),
    "nnx_LayerNorm": ("nnx.LayerNorm(8, rngs=rngs)", SIGNAL),
    "nnx_RMSNorm": ("nnx.RMSNorm(8, rngs=rngs)", SIGNAL),
    "nnx_GroupNorm": ("nnx.GroupNorm(4, num_groups=2, rngs=rngs)", IMAGE),
    "nnx_Embed": ("nnx.Embed(50, 12, rngs=rngs)", ("int32", 50, 9)),
    "nnx_Einsum": ("nnx.Einsum('bic,cd->bid', (8, 6), None, rngs=rngs)", SIGNAL),
    "nnx_attention": ("nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)", SIGNAL),
    "nnx_LSTM": ("nnx.RNN(nnx.LSTMCell(8, 12, rngs=rngs))", SIGNAL),
    "nnx_GRU": ("nnx.RNN(nnx.GRUCell(8, 12, rngs=rngs))", SIGNAL),
    "nnx_avg_pool": ("lambda x: nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))", IMAGE),
    "nnx_max_pool_same": ("lambda x: nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding='SAME')", IMAGE),
    "nnx_mlp": ("nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 10, rngs=rngs), nnx.softmax)", ROW),
    "nnx_cnn": ("nnx.Sequential(nnx.Conv(4, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs), nnx.relu, partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)), nnx.Conv(8, 16, (3, 3), rngs=rngs), nnx.relu, lambda x: x.mean((1, 2)), nnx.Linear(16, 5, rngs=rngs))", IMAGE),
    "nnx_block": ("Block(nnx, rngs)", SIGNAL),
    "eqx_MLP": ("jax.vmap(eqx.nn.MLP(32, 5, 24, 2, key=key))", ROW),
    "eqx_Conv2d": ("jax.vmap(eqx.nn.Conv2d(16, 6, 3, padding=1, key=key))", IMAGE),
    "eqx_LayerNorm": ("jax.vmap(jax.vmap(eqx.nn.LayerNorm(8)))", SIGNAL),
    "eqx_attention": ("jax.vmap(lambda x: ATTENTION(x, x, x))", SIGNAL),
    "eqx_GRU": ("jax.vmap(lambda x: lax.scan(lambda h, a: (CELL(a, h), None), jnp.zeros(12), x)[0])", SIGNAL),
}  # fmt: skip


def recipes(_: str) -> Iterator[Recipe]:
    for name, (text, shapes) in FUNCTIONS.items():
        yield Recipe(name, partial(_exported, text, shapes))


def _block(nnx: Any, rngs: Any) -> Any:
    """A block of a transformer, written as a class."""

    class Block(nnx.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.norms = nnx.List([nnx.LayerNorm(8, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.wide, self.narrow = (nnx.Linear(*d, rngs=rngs) for d in ((8, 16), (16, 8)))

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norms[0](x))
            return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))

    return Block()


def _exported(text: str, shapes: Any) -> Product:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import equinox as eqx
    import jax
    import jax2onnx
    from flax import nnx

    key = jax.random.key(0)
    scope = {
        "jax": jax, "jnp": jax.numpy, "lax": jax.lax, "nnx": nnx, "rngs": nnx.Rngs(0),
        "eqx": eqx, "key": key, "partial": partial, "Block": _block,
        "ATTENTION": eqx.nn.MultiheadAttention(2, 8, key=key), "CELL": eqx.nn.GRUCell(8, 12, key=key),
    }  # fmt: skip
    function = eval(text, scope)
    several = shapes if isinstance(shapes, list) else [shapes]
    kinds = [s[:2] if isinstance(s[0], str) else ("float32", 0) for s in several]
    dims = [s[2:] if isinstance(s[0], str) else s for s in several]

    def written(batch: Any) -> Any:
        specs = [
            jax.ShapeDtypeStruct((batch, *d), kind)
            for d, (kind, _) in zip(dims, kinds, strict=True)
        ]
        if isinstance(batch, str):
            specs = [("B", *d) for d in dims] if kinds[0][1] == 0 else specs
        return jax2onnx.to_onnx(function, specs)

    rows = dict(ROWS)
    try:
        if kinds[0][1]:
            raise ValueError("shapes with names are of float32")
        model = written("B")
    except TimeoutError:
        raise
    except Exception:
        rows = {"batch": ROWS["batch"]}
        model = written(ROWS["batch"])
    names = [value.name for value in onnx.load_from_string(model.SerializeToString()).graph.input]
    cases = {}
    for case, count in rows.items():
        rng = np.random.default_rng(0)
        arrays = [
            rng.integers(0, below, (count, *d)).astype(kind)
            if below
            else rng.standard_normal((count, *d)).astype(np.float32)
            for d, (kind, below) in zip(dims, kinds, strict=True)
        ]
        answers = [
            np.asarray(leaf) for leaf in jax.tree.leaves(function(*map(jax.numpy.asarray, arrays)))
        ]
        cases[case] = Case(dict(zip(names, arrays, strict=True)), answers)
    return Product(model.SerializeToString(), cases)
