"""Random copies, indices, models, texts and searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.numpy_helper import to_array

from penstock.core.types import STRING
from penstock.ops.internal.arrays import APPEND
from penstock.ops.internal.search import SEARCH_END, SEARCH_START, SEARCH_STEP, STATE
from penstock.ops.internal.transfer import REORDER
from tests.support import tree_models
from tests.support.draws import CODES, FLOATS, WHOLE, Draw, Source, draws, short_name
from tests.support.error_bounds import Rounded, gamma, unit
from tests.support.native_kernels import expected

_ALL = (*FLOATS, *WHOLE, *CODES, "float16", "bool")


def random_places(rng: Source, dims: Sequence[int], size: int) -> np.ndarray:
    """Indices of an axis; now and then one is out of range."""
    dtype = rng.pick(*WHOLE)
    if not size:
        return np.zeros((0,) * len(dims), dtype)
    places = rng.integers(-size, size, dims).astype(dtype)
    if places.size and rng.chance(0.08):
        places.flat[rng.integers(places.size)] = rng.pick(size, -size - 1, np.iinfo(dtype).min)
    return np.asarray(places)


@draws("Gather GatherElements GatherND ScatterElements ScatterND")
def _index(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4), 2000)
    axis, attrs = int(rng.integers(-len(dims), len(dims))), {}
    reduced = (*FLOATS, *WHOLE) if name[0] == "S" else ()
    x = rng.numbers(dims, rng.pick(*_ALL, *reduced), 0.3)
    if name.endswith("ND"):
        depth = int(rng.integers(1, len(dims) + 1))
        batch = int(rng.integers(depth)) if name[0] == "G" and rng.chance(0.4) else 0
        shape = (*dims[:batch], *rng.dims(1), max(depth - batch, 1))
        columns = [random_places(rng, shape[:-1], dims[batch + i]) for i in range(shape[-1])]
        indices = np.stack([c.astype(np.int64) for c in columns], -1)
        attrs = {"batch_dims": batch} if name[0] == "G" else {}
        update = (*shape[:-1], *dims[shape[-1] :])
    else:
        inner = [rng.size(max(n, 1)) for n in dims]
        inner[axis] = rng.size(33)
        shape = tuple(inner) if "Elements" in name else rng.dims(rng.integers(3), 60)
        indices, attrs, update = random_places(rng, shape, dims[axis]), {"axis": axis}, shape
    inputs = [x, indices]
    if name[0] == "S":
        inputs.append(rng.numbers(update, x.dtype.name, 0.3))
        if x.dtype.name in reduced and rng.chance(0.7):
            attrs |= {"reduction": rng.pick("add", "mul", "max", "min")}
    return Draw(name, inputs, attrs)


@draws("tensorflow.ScatterNd tflite.Segment tflite.SparseToDense")
def _into_filled(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(1, 4), 2000)
    x_type = rng.pick(*FLOATS, *WHOLE, *(() if name == "Segment" else (*CODES, "int16", "bool")))
    depth = {"Segment": 1, "ScatterNd": int(rng.integers(1, len(dims) + 1))}.get(name, len(dims))
    lead = rng.dims(1, 60)
    columns = [random_places(rng, lead, dims[i]) for i in range(depth)]
    columns = [c if name == "Segment" or rng.chance(0.1) else np.abs(c) for c in columns]
    places = np.stack(columns, -1).astype(rng.pick(*WHOLE))
    shape = np.array(dims, rng.pick(*WHOLE))
    x = rng.numbers((*lead, *dims[depth:]), x_type, 0.3)
    if name == "ScatterNd":
        return Draw(name, [places, x, shape], {}, None, [2], domain=domain, version=1)
    if name == "Segment":
        attrs = {"reduction": rng.pick("sum", "prod", "max", "min")}
        inputs = [x, places[:, 0], shape[:1].reshape(())]
        return Draw(name, inputs, attrs, None, [2], domain=domain, version=1)
    inputs = [places, shape, x, rng.numbers((), x_type)]
    return Draw(name, inputs, {}, None, [1], domain=domain, version=1)


@draws("tflite.SliceGather tflite.SliceScatter")
def _whole_slices(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(1, 4), 2000)
    depth, lead = int(rng.integers(1, len(dims) + 1)), rng.dims(rng.integers(1, 3), 40)
    axes = rng.permutation(depth).tolist()
    places = np.stack([random_places(rng, lead, dims[axis]) for axis in axes], -1)
    places, at = (places[..., 0], len(lead)) if depth == 1 and rng.chance(0.5) else (places, -1)
    attrs: dict[str, Any] = {"index_vector_dim": at % places.ndim if at < 0 else at}
    windows = [*range(len(lead), len(lead) + len(dims) - depth)]
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE), 0.3)
    if name == "SliceGather":
        attrs |= {"offset_dims": windows, "collapsed_slice_dims": [*range(depth)]}
        attrs |= {"start_index_map": axes, "slice_sizes": [*[1] * depth, *dims[depth:]]}
        return Draw(name, [x, places], attrs, domain=domain, version=1)
    attrs |= {"update_window_dims": windows, "inserted_window_dims": [*range(depth)]}
    attrs |= {"scatter_dims_to_operand_dims": axes}
    attrs["reduction"] = rng.pick("", "add", "multiply", "minimum", "maximum")
    updates = rng.numbers((*lead, *dims[depth:]), x.dtype.name, 0.3)
    return Draw(name, [x, places, updates], attrs, domain=domain, version=1)


@draws("tflite.DynamicUpdateSlice tflite.Bucketize tflite.Spread")
def _parts(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(1, 4), 1500)
    x = rng.numbers(dims, rng.pick(*(_ALL if name != "Bucketize" else (*FLOATS, *WHOLE))), 0.3)
    if name == "Bucketize":
        bounds = np.sort(rng.normal(0, 5, rng.pick(1, 3, 24, 25, 60))).astype(np.float32)
        return Draw(name, [x], {"boundaries": bounds.tolist()}, domain=domain, version=1)
    if name == "Spread":
        steps = np.array([rng.integers(1, 4) for _ in dims], rng.pick(*WHOLE))
        ends = [[int(rng.pick(0, 0, 1, 3, -1)) for _ in dims] for _ in range(2)]
        attrs = dict(zip(("low", "high"), ends, strict=True)) if rng.chance(0.7) else {}
        inputs = [x, steps, rng.numbers((), x.dtype.name)]
        return Draw(name, inputs, attrs, None, [1, 2], domain=domain, version=1)
    part = rng.numbers([rng.integers(1, n + 1) for n in dims], x.dtype.name, 0.3)
    start = np.array([rng.integers(-2, n + 2) for n in dims], rng.pick(*WHOLE))
    return Draw(name, [x, part, start], domain=domain, version=1)


@draws("tflite.ReduceWindow")
def _windows_of_any_axes(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(1, 4), 1500)
    sizes = [int(rng.integers(1, min(n, 4) + 1)) for n in dims]
    numbers = [np.array(own) for own in (sizes, rng.integers(1, 3, len(dims)))]
    numbers.append(rng.integers(1, 3, len(dims)))
    x_type = rng.pick(*FLOATS, *WHOLE)
    reduction = rng.pick("add", "maximum", "minimum", "multiply")
    is_rounded = x_type in FLOATS and reduction in ("add", "multiply")
    x, first = rng.numbers(dims, x_type, 0 if is_rounded else 0.3), rng.numbers((), x_type)
    count = math.prod(sizes) + 1

    def bound(draw: Draw) -> list[Rounded | None]:
        if reduction == "add":
            return draw.linear(count)
        (value,) = draw.wide()
        return [Rounded.exact(value, draw.dtype).rounded(value, 0, count)]

    attrs, inputs = {"reduction": reduction}, [x, first, *numbers]
    own = bound if is_rounded else None
    return Draw(name, inputs, attrs, own, [2, 3, 4], domain=domain, version=1)


@draws("TopK")
def _top(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4))
    axis = int(rng.integers(-len(dims), len(dims)))
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE, *CODES, "int16"), 0.5)
    if rng.chance(0.3):
        x = np.resize(x, (rng.pick(300, 1030), *x.shape[1:2])).astype(x.dtype)
        axis = 0
    count = np.array([rng.pick(rng.integers(0, x.shape[axis] + 1), x.shape[axis])])
    attrs = {"axis": axis, "largest": int(rng.chance(0.5)), "sorted": int(rng.chance(0.7))}
    return Draw(name, [x, count], attrs, None, [1], 2)


@draws("tensorflow.OneHot")
def _one_hot(rng: Source, full_name: str) -> Draw:
    dims, dtype = rng.dims(rng.pick(1, 2, 3), 300), rng.pick(*_ALL)
    picked = rng.integers(-2, 9, dims).astype(rng.pick(*WHOLE))
    inputs = [picked, np.array(rng.size(9)), rng.numbers((), dtype), rng.numbers((), dtype)]
    attrs = {"axis": int(rng.integers(-1, len(dims)))}
    return Draw("OneHot", inputs, attrs, None, [1, 2, 3], domain="tensorflow", version=1)


@draws("EyeLike OneHot ReverseSequence Trilu")
def _select(rng: Source, name: str) -> Draw:
    dims, far = rng.dims(rng.pick(2, 2, 3), 2000), int(rng.pick(0, 1, -2, 99, -99))
    x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
    if name == "EyeLike":
        return Draw(name, [x.reshape(dims[0], -1)], {"k": far})
    if name == "Trilu":
        return Draw(name, [x, np.array(far)], {"upper": int(rng.chance(0.5))}, None, [1])
    if name == "OneHot":
        picked, values = rng.integers(-9, 9, dims), rng.numbers((2,), rng.pick(*_ALL))
        inputs = [picked.astype(rng.pick(*WHOLE)), np.array([rng.size(9)]), values]
        return Draw(name, inputs, {"axis": int(rng.integers(-1, len(dims)))}, None, [1])
    time = int(rng.integers(2))
    most = dims[time] + 1 + rng.chance(0.1)
    lengths = rng.integers(0, max(most, 1), dims[1 - time])
    return Draw(name, [x, lengths], {"time_axis": time, "batch_axis": 1 - time})


@draws("Concat Tile penstock.Reorder penstock.Append")
def _copies(rng: Source, full_name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 1500, least=0)
    dtype, axis = rng.pick(*_ALL), int(rng.integers(len(dims)))
    x = rng.numbers(dims, dtype, 0.3)
    if full_name == "Tile":
        return Draw("Tile", [x, rng.integers(0, 4, len(dims))], constants=rng.pick([], [1]))
    if full_name == "penstock.Reorder":
        return Draw(REORDER, [x], {"order": tuple(rng.permutation(len(dims)).tolist())})
    count = 2 if full_name[0] == "p" else rng.integers(1, 5)
    sizes = [rng.size(33, 0) for _ in range(count)]
    parts = [rng.numbers((*dims[:axis], n, *dims[axis + 1 :]), dtype) for n in sizes]
    name: Any = APPEND if full_name[0] == "p" else "Concat"
    return Draw(name, parts, {"axis": axis})


@draws("Split tensorflow.Unpack")
def _parts(rng: Source, full_name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 1500)
    axis, (name, domain) = int(rng.integers(len(dims))), short_name(full_name)
    count = int(rng.integers(2, 6))
    if name == "Unpack":
        dims = (*dims[:axis], count, *dims[axis + 1 :])
        attrs = {"axis": axis - rng.pick(0, len(dims)), "num": count}
        x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
        return Draw(name, [x], attrs, outputs=count, domain=domain, version=1)
    sizes = rng.integers(0, 9, count)
    x = rng.numbers((*dims[:axis], sizes.sum(), *dims[axis + 1 :]), rng.pick(*_ALL), 0.3)
    return Draw(name, [x, sizes], {"axis": axis}, None, [1], count)


@draws("Expand Range Reshape Slice")
def _views(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 1500)
    x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
    if name == "Range":
        dtype, step = rng.pick(*FLOATS, *WHOLE), rng.pick(1, 2, -1, 3)
        ends = [0, step * rng.size(65), step]
        return Draw(name, [np.array(v, dtype) for v in ends])
    if name == "Expand":
        target = [n if m == 1 else m for n, m in zip(rng.dims(len(dims), 30), dims, strict=True)]
        return Draw(name, [x, np.array(target)])
    if name == "Reshape":
        order = np.array([*rng.permutation(dims)])
        order[rng.integers(len(order))] = -1
        return Draw(name, [x, order])
    far = 2**62
    starts, ends = (
        np.array([rng.pick(0, -1, 1, n, -n - 5, far, -far) for n in dims]) for _ in range(2)
    )
    steps = np.array([rng.pick(1, 1, 2, -1, -3) for _ in dims])
    return Draw(name, [x, starts, ends, np.arange(len(dims)), steps])


def _ml(name: str, x: Any, constants: Any = (), version: int = 4, **attrs: Any) -> Draw:
    inputs = x if isinstance(x, list) else [x]
    outputs = 2 if name.endswith("Classifier") else 1
    return Draw(name, inputs, attrs, None, constants, outputs, "ai.onnx.ml", version)


@draws("ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Imputer ai.onnx.ml.LabelEncoder")
@draws("ai.onnx.ml.OneHotEncoder ai.onnx.ml.Scaler ai.onnx.ml.Normalizer")
@draws("ai.onnx.ml.FeatureVectorizer")
def _features(rng: Source, full_name: str) -> Draw:
    name, _ = short_name(full_name)
    dtype, dims = rng.pick(*FLOATS, *WHOLE), (rng.size(65), rng.size(33))
    x = rng.numbers(dims, dtype, 0.3 * (name != "Normalizer"))
    if name == "ArrayFeatureExtractor":
        x = rng.numbers(dims, rng.pick(*_ALL))
        return _ml(
            name,
            [
                x,
                np.abs(random_places(rng, (1, rng.size(9)), dims[1]).astype(np.int64) + 0.5).astype(
                    np.int64
                ),
            ],
        )
    if name == "Scaler":
        width = dims[1] if rng.chance(0.6) else 1
        offset, scale = (rng.numbers((width,), "float32").tolist() for _ in range(2))
        return _ml(name, x, offset=offset, scale=scale)
    if name == "Imputer":
        values = list(range(dims[1] if rng.chance(0.5) else 1))
        if dtype in WHOLE:
            return _ml(name, x % 4, imputed_value_int64s=values, replaced_value_int64=1)
        replaced = rng.pick(math.nan, 0.0, math.inf)
        floats = [float(v) for v in values]
        return _ml(name, x, imputed_value_floats=floats, replaced_value_float=replaced)
    if name == "LabelEncoder":
        if rng.chance(0.3):
            return _texts(rng, full_name)
        keys = np.asarray(rng.integers(-9, 9, rng.size(17))).astype(dtype)
        values = rng.numbers(keys.shape, rng.pick(*FLOATS, *WHOLE))
        known = rng.integers(-12, 12, dims).astype(dtype)
        default = np.array([7], values.dtype)
        options = {"keys_tensor": keys, "values_tensor": values, "default_tensor": default}
        return _ml(name, known, **options)
    if name == "FeatureVectorizer":
        parts = [rng.numbers((dims[0], rng.size(33)), "float32") for _ in range(rng.size(4))]
        widths = {"inputdimensions": [x.shape[1] for x in parts]} if rng.chance(0.5) else {}
        return _ml(name, parts, version=1, **widths)
    if name == "OneHotEncoder":
        if rng.chance(0.3):
            return _texts(rng, full_name)
        cats = [5, rng.pick(-1, -(1 << 40)), 2, 5][: rng.integers(1, 5)]
        return _ml(name, rng.integers(-2, 7, dims), version=1, cats_int64s=cats)
    norm = rng.pick("MAX", "L1", "L2")

    def bound(draw: Draw) -> list[Rounded | None]:
        x = Rounded.exact(draw.inputs[0], np.dtype("float32"))
        size = x.max(1) if norm == "MAX" else abs(x).sum(1, True)
        size = (x * x).sum(1, True).sqrt() if norm == "L2" else size
        return [x / size]

    draw = _ml(name, x if dtype in FLOATS else x % 99 + 1, norm=norm)
    draw.bound, draw.is_formula = bound, True
    return draw


@draws("ai.onnx.ml.LinearClassifier ai.onnx.ml.LinearRegressor")
@draws("ai.onnx.ml.SVMClassifier ai.onnx.ml.SVMRegressor")
def _models(rng: Source, full_name: str) -> Draw:
    (name, _), width = short_name(full_name), rng.size(65)
    dtype = rng.pick(*FLOATS, *WHOLE)
    x = rng.normal(0, 1, (rng.size(33), width))
    x = (np.rint(3 * x) if dtype in WHOLE else x).astype(dtype)
    floats = lambda *dims: rng.normal(0, 0.3, dims).astype(np.float32)  # noqa: E731
    classes = rng.integers(2, 6)
    rows = classes if "Classifier" in name else rng.size(5)
    vectors = rng.pick(1, 7, 40, 600)
    if name.startswith("Linear"):
        weights, terms = floats(rows, width), floats(rows)
        attrs: dict[str, Any] = {"coefficients": weights.reshape(-1).tolist()}
        attrs |= {"intercepts": terms.tolist()}
        attrs |= {"targets": rows} if rows != classes or "Regressor" in name else {}
    elif name == "SVMRegressor":
        attrs = {"coefficients": floats(vectors).tolist(), "rho": [0.125], "n_supports": vectors}
    else:
        vectors = 3 * classes
        attrs = {"coefficients": floats(classes - 1, vectors).reshape(-1).tolist()}
        attrs |= {"vectors_per_class": [3] * classes}
        attrs |= {"rho": floats(classes * (classes - 1) // 2).tolist()}
    if name.startswith("SVM"):
        kernel = rng.pick("LINEAR", "POLY", "RBF", "SIGMOID")
        support = floats(vectors, width)
        attrs |= {"kernel_type": kernel, "kernel_params": [0.25, 0.5, 3.0]}
        attrs |= {"support_vectors": support.reshape(-1).tolist()}
    if "Classifier" in name:
        attrs |= {"classlabels_ints": list(range(classes))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # All in float64, and products of float32 with many vectors in float32; results are float32.
        narrow = name.startswith("SVM") and dtype == "float32" and vectors * width >= 2**13
        kind = np.dtype("float32" if narrow or name.startswith("Linear") else "float64")
        x = Rounded.exact(draw.inputs[0], kind)
        if name.startswith("Linear"):
            y = x @ Rounded.exact(weights.T, kind) + terms.astype(np.float64)
        else:
            machine = Rounded.exact(support.T, kind)
            if kernel == "RBF":
                parts = (x * x).sum(1, True) + (machine * machine).sum(0, True) + (x @ machine) * -2
                sums = (parts * -0.25).lipschitz(np.exp, 1)
            else:
                sums = (x @ machine) * (0.25 if kernel != "LINEAR" else 1.0)
                sums = sums + 0.5 if kernel != "LINEAR" else sums
                sums = sums * sums * sums if kernel == "POLY" else sums
                sums = sums.tanh() if kernel == "SIGMOID" else sums
            coefficients = np.array(attrs["coefficients"])[:, None]
            y = sums @ Rounded.exact(coefficients, kind) + 0.125
        return [*[None] * ("Classifier" in name), y.cast(np.dtype("float32"))]

    draw = _ml(name, x, version=1, **attrs)
    if name == "SVMClassifier":
        draw.bound = lambda draw: [None, _of_numpy(draw, 1)]
    else:
        draw.bound = bound
    draw.is_formula = True
    return draw


def _of_numpy(draw: Draw, output: int) -> Rounded:
    """What NumPy's kernel computes in float64 and rounds to float32, as the compiled one does."""
    value = expected(draw.node, draw.inputs)[output].astype(np.float64)
    return Rounded.exact(0, np.dtype("float32")).rounded(value, np.full(value.shape, 2e-6), 4)


@draws("ai.onnx.ml.TreeEnsemble ai.onnx.ml.TreeEnsembleClassifier")
@draws("ai.onnx.ml.TreeEnsembleRegressor")
def _trees(rng: Source, full_name: str) -> Draw:
    name, _ = short_name(full_name)
    dtype, count = rng.pick(*FLOATS, *WHOLE), rng.pick(1, 7, 8, 9, 40)
    x = tree_models.rows(rng, count, dtype in FLOATS)
    x = (np.nan_to_num(x) if dtype in WHOLE else x).astype(dtype)
    if name == "TreeEnsemble":
        wide = rng.pick(*FLOATS)
        attrs, _ = tree_models.ensemble(rng, np.dtype(wide).type, True)
        attrs = {k: to_array(v) if hasattr(v, "raw_data") else v for k, v in attrs.items()}
        x = tree_models.rows(rng, count, True).astype(wide)
        draw = _ml(name, x, version=5, **attrs, aggregate_function=int(rng.integers(4)))
    else:
        forest = tree_models.Trees(rng, rng.pick(1, 3, 11), 4, tree_models.MODES, True)
        classes, several = rng.pick(1, 2, 3), rng.chance(0.5)
        prefix = "class" if "Classifier" in name else "target"
        votes = forest.votes(prefix, list(range(classes)), rng.chance(0.5), several)
        labels = {"classlabels_int64s": list(range(max(classes, 2)))}
        attrs = {**forest.lists, **votes, **(labels if prefix == "class" else {})}
        attrs |= {} if prefix == "class" else {"n_targets": classes}
        draw = _ml(name, x, version=3, **attrs)
    # Votes are added in the order of the trees, in float64.
    return draw


NAMES = ("ant", "bee", "", "Ünï", "bee2", "The quick, brown_fox 7", "né à Paris\n", "日本 a-b", " ")


@draws("RegexFullMatch StringSplit TfIdfVectorizer ai.onnx.ml.CategoryMapper ai.onnx.ml.ZipMap")
@draws("com.microsoft.MurmurHash3 com.microsoft.Tokenizer StringNormalizer")
def _texts(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(1, 3), 300)
    x = rng.named(NAMES, dims)
    if name == "RegexFullMatch":
        return Draw(
            name, [x], {"pattern": rng.pick(r"\w*", r"[^\d,]+", "日本.*", "", "(?i)THE .*")}
        )
    if name == "StringNormalizer":
        if len(dims) > 1 and rng.chance(0.8):
            x = x[:1]
        attrs = {"case_change_action": rng.pick("LOWER", "UPPER", "NONE")}
        attrs |= rng.pick({}, {"stopwords": ["BEE", "ant"]}, {"stopwords": [*NAMES]})
        return Draw(name, [x], {**attrs, "is_case_sensitive": int(rng.chance(0.5))})
    if name == "StringSplit":
        attrs = rng.pick({}, {"delimiter": ","}, {"delimiter": " ", "maxsplit": 1})
        return Draw(name, [x], attrs, outputs=2)
    if name == "MurmurHash3":
        x = rng.pick(x, *[rng.numbers(dims, d) for d in ("int32", "uint32", "float64")])
        return Draw(name, [x], {"seed": 7}, domain=domain, version=1)
    if name == "Tokenizer":
        attrs = {"mark": int(rng.chance(0.5)), "pad_value": "#", "mincharnum": 1}
        attrs |= rng.pick({"tokenexp": r"\w+"}, {"separators": [" "]}, {"separators": [""]})
        return Draw(name, [x], attrs, domain=domain, version=1)
    if name == "TfIdfVectorizer":
        attrs = {"mode": rng.pick("TF", "IDF", "TFIDF"), "min_gram_length": 1}
        attrs |= {"max_gram_length": 2, "max_skip_count": rng.integers(3)}
        attrs |= {"ngram_counts": [0, 3], "ngram_indexes": [2, 0, 1, 3, 4]}
        attrs |= {"weights": [0.5, 2.0, 3.0, 1.0, 4.0]}
        if rng.chance(0.5):
            attrs |= {"pool_int64s": [5, -1, 2**40, *(5, -1), *(5, 5)]}
            return Draw(name, [rng.choice([5, -1, 2**40, 0], dims)], attrs)
        attrs |= {"pool_strings": ["ant", "bee", "", *("ant", "bee"), *("bee", "bee")]}
        return Draw(name, [x], attrs)
    if name == "ZipMap":
        scores = rng.numbers((rng.size(65), 3), "float32", 0.3)
        return _ml(name, scores, version=1, classlabels_int64s=[3, 1, 2])
    if name == "OneHotEncoder":
        return _ml(name, x, version=1, cats_strings=list(NAMES[:4]), zeros=1)
    if name == "LabelEncoder":
        keys = {"keys_strings": list(NAMES[:4]), "values_int64s": [5, 6, 7, 8]}
        return _ml(name, x, version=4, **keys)
    cats = {"cats_strings": list(NAMES[:3]), "cats_int64s": [4, 5, 6], "default_int64": 9}
    return _ml(name, x, version=1, **cats)


@draws("tflite.HashtableFind tflite.SkipGram")
def _tables_of_texts(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    if name == "SkipGram":
        attrs = {"ngram_size": rng.integers(-1, 5), "max_skip_size": rng.integers(-1, 4)}
        attrs["include_all_ngrams"] = bool(rng.chance(0.5))
        x = np.array([" ".join(rng.named(NAMES, rng.pick((0,), (1,), (5,), (30,))))], STRING)
        return Draw(name, [x], attrs, domain=domain, version=1)
    keys, values = rng.named(NAMES[:6], (5,)), rng.numbers((5,), "int64")
    inputs = [keys, values, rng.named(NAMES, rng.dims(rng.integers(3), 300)), np.array([-1])]
    return Draw(name, inputs, {}, None, [0, 1], domain=domain, version=1)


@draws("tflite.RngBitGenerator tflite.LshProjection tflite.HashtableLookup")
def _tables(rng: Source, full_name: str) -> Draw:
    (name, domain), attrs = short_name(full_name), {}
    if name == "RngBitGenerator":
        state = rng.numbers((rng.pick(2, 2, 3, 4),), "uint64")
        attrs = {"algorithm": rng.pick(0, 1, 2), "shape": list(rng.dims(rng.integers(3)))}
        attrs["dtype"] = rng.pick(*WHOLE, "uint32", "uint64")
        return Draw(name, [state], attrs, outputs=2, domain=domain, version=1)
    if name == "LshProjection":
        rows, bits, items = rng.size(17), rng.pick(0, 1, 3, 16, 32, 33), rng.size(33)
        shape = (items, *rng.pick((), (1,), (3,), (15,), (16,), (17,), (40,), (2, 70)))
        x = rng.numbers(shape, rng.pick("uint8", *FLOATS, *WHOLE), 0.3)
        inputs = [rng.numbers((rows, bits), "float32", 0.3), x]
        inputs += [rng.numbers((items,), "float32", 0.3)] if rng.chance(0.5) else []
        return Draw(name, inputs, {"dense": rng.integers(2)}, domain=domain, version=1)
    key, count = rng.pick(*WHOLE), rng.size(257)
    keys = np.sort(rng.numbers((count,), key))
    wanted = rng.choice(np.append(keys, rng.numbers((9,), key)), rng.dims(rng.integers(3), 60))
    values = rng.numbers((count, *rng.dims(rng.integers(3), 300)), rng.pick(*_ALL))
    inputs = [np.asarray(wanted, key), keys, values]
    return Draw(name, inputs, {}, None, rng.pick([], [1, 2]), 2, domain, 1)


@draws("NonZero tensorflow.Where")
def _nonzero(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = short_name(full_name), rng.dims(rng.integers(5), least=0)
    x = rng.numbers(dims, rng.pick(*_ALL, "uint16", "complex64"), 0.5)
    x = np.where(rng.random(dims) < rng.pick(0, 0.1, 0.99), np.zeros((), x.dtype), x)
    return Draw(name, [x], domain=domain, version=1 if domain else 26)


@draws("Unique tensorflow.Unique tensorflow.UniqueWithCounts")
def _distinct(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    x = rng.numbers(rng.dims(1 if domain else rng.integers(4), least=0), rng.pick(*_ALL), 0.5)
    if rng.chance(0.5):
        x = np.resize(x, 2000 if x.size else 0)
    most = 2 + ("Counts" in name) if domain else 4
    attrs = {"out_idx": rng.pick(*WHOLE)} if domain else {"sorted": int(rng.chance(0.5))}
    outputs = most if domain else int(rng.integers(1, most + 1))
    return Draw(name, [x], attrs, None, (), outputs, domain, 1 if domain else 26)


@draws("com.microsoft.NGramRepeatBlock")
def _ngrams(rng: Source, full_name: str) -> Draw:
    (name, domain), rows, words = short_name(full_name), rng.size(9), rng.size(65)
    ids = rng.integers(0, min(words, 3), (rows, rng.integers(0, 40)))
    scores, attrs = rng.numbers((rows, words), "float32"), {"ngram_size": rng.integers(1, 6)}
    return Draw(name, [ids, scores], attrs, domain=domain, version=1)


@draws("com.microsoft.NGramHashMapping com.microsoft.VarlenNGramHashMapping")
def _hashes(rng: Source, full_name: str) -> Draw:
    (name, domain), packed = short_name(full_name), "Varlen" in full_name
    most, heads, lengths = rng.integers(2, 6), rng.size(9), rng.integers(1, 9, rng.size(7))
    batch, length = len(lengths), rng.size(17)
    hashes = (most - 1) * heads
    small, wide = (lambda *d: rng.integers(-1, 5, d)), (lambda *d: rng.numbers(d, "int64"))
    sizes = np.maximum(np.abs(rng.numbers((hashes,), "int64")) >> rng.integers(1, 60), 1)
    ids = small(lengths.sum()) if packed else small(batch, length)
    factors = wide(most + rng.integers(2))
    bounds = [np.append(0, lengths.cumsum()).astype(np.int32)] if packed else []
    past, offsets = small(batch, most - 1), small(hashes)
    rest = [past, offsets, np.array(rng.integers(4))][: rng.integers(4)]
    rest = [None if rng.chance(0.3) else x for x in rest[:-1]] + rest[-1:]
    attrs = {"pad_id": 3, "max_ngram_size": most, "n_head_per_ngram": heads}
    inputs = [ids, factors, sizes, *bounds, *rest]
    return Draw(name, inputs, attrs, domain=domain, outputs=rng.integers(1, 3), version=1)


@draws("com.microsoft.WordConvEmbedding")
def _words(rng: Source, full_name: str) -> Draw:
    (name, domain), characters, filters, width = short_name(full_name), rng.size(9), rng.size(65), 4
    window, many = rng.integers(1, characters + 1), rng.size(17)
    words = rng.integers(0, many + rng.chance(0.1), (rng.size(33), characters)).astype(np.int32)
    weights = rng.normal(size=(filters, 1, window, width)).astype(np.float32)
    bias, table = (rng.normal(size=n).astype(np.float32) for n in (filters, (many, width)))

    def bound(draw: Draw) -> list[Rounded | None]:
        y = draw.wide()[0]
        # Sums of about 4 terms each, and the tanh of c/core/math32.h.
        return [Rounded.exact(y, np.dtype("float32")).inexact(2e-5)]

    inputs = [words, weights, bias, table]
    return Draw(name, inputs, {}, bound, [1, 2, 3], domain=domain, version=1)


@draws("com.microsoft.BifurcationDetector com.microsoft.DynamicTimeWarping")
def _of_unknown_length(rng: Source, full_name: str) -> Draw:
    (name, domain), length = short_name(full_name), rng.size(129)
    if name == "DynamicTimeWarping":
        costs = rng.numbers((rng.size(33), rng.size(65)), "float32", 0.2)
        return Draw(name, [costs[None] if rng.chance(0.3) else costs], domain=domain, version=1)
    source, current = rng.integers(0, 3, length), rng.integers(0, 3, rng.integers(5))
    start = np.array([rng.integers(length + 1)])
    predicted = np.append(source[start[0] :], 1)
    predicted[rng.integers(len(predicted)) :] = 2
    inputs = [source, current, start, *([predicted] if rng.chance(0.7) else [])]
    sizes = {"min_ngram_size": rng.integers(1, 3), "max_ngram_size": rng.integers(3, 6)}
    return Draw(name, inputs, sizes, domain=domain, outputs=2, version=1)


_SEARCH = {"pad_token_id": 0, "eos_token_id": 1, "early_stopping": 0}


@draws("penstock.SearchEnd penstock.SearchStart penstock.SearchStep")
def _search(rng: Source, full_name: str) -> Draw:
    """A step of a search that has begun, its end, or its start."""
    kind = rng.pick("GreedySearch", "Sampling", "BeamSearch")
    beam = kind == "BeamSearch"
    batch, length, most, words = rng.size(5), rng.integers(1, 9), rng.integers(10, 17), rng.size(65)
    beams, words = rng.integers(1, 5) if beam else 1, max(words, 2)
    rows = batch * beams
    tokens = lambda *dims: rng.integers(0, words, dims).astype(np.int32)  # noqa: E731
    number = lambda x, dtype="float32": np.array([x], dtype)  # noqa: E731
    attrs = {**_SEARCH, "kind": kind, "beam_search": beam, "early_stopping": rng.integers(2)}
    attrs |= {"no_repeat_ngram_size": rng.integers(0, 4)}
    ids, penalty = tokens(batch, length), number(rng.pick(0.0, 1.0, 2.0))
    if full_name.endswith("Start"):
        mask = tokens(batch, length) if rng.chance(0.5) else None
        inputs = [ids, number(most, "int32"), number(beams, "int32"), mask]
        return Draw(SEARCH_START, inputs, attrs, outputs=2 + STATE)
    ended_scores = rng.normal(size=(batch, beams)).astype(np.float32)
    ended_scores[rng.random((batch, beams)) < 0.5] = -np.inf
    scores, done = rng.normal(size=rows).astype(np.float32), rng.random(batch) < 0.2
    kept = [scores, tokens(batch, beams, most), ended_scores, done]
    if full_name.endswith("End"):
        returned, first = number(rng.integers(1, beams + 1), "int32"), ended_scores[..., None]
        inputs = [tokens(rows, length), *kept, penalty, returned, first, None, ids]
        return Draw(SEARCH_END, inputs, attrs, outputs=1 + beam)
    logits = rng.normal(size=(rng.pick(rows, batch), rng.integers(1, 4), words))
    state = [tokens(rows, 1), tokens(rows, 1), tokens(rows, length), tokens(rows, length), *kept]
    limits = [number(rng.integers(12), "int32"), penalty, number(rng.pick(0.7, 1.0, 1.3))]
    limits += [rng.integers(0, 2, dims).astype(np.int32) for dims in (words, (batch, words))]
    present = rng.integers(0, 2, (batch, words)).astype(np.int32)
    limits += [number(rng.pick(0.5, 1.0)), present, number(rng.integers(99), "int32")]
    limits = [x if rng.chance(0.6) else None for x in limits]
    prompt = ids[:, : rng.integers(1, length + 1)]
    inputs = [logits.astype(np.float32), *state, prompt, *limits, None]
    if kind == "Sampling":
        attrs |= {"temperature": 1.5, "top_p": rng.pick(0.3, 0.8), "filter_value": -1e20}
        attrs |= {"presence_penalty": 0.5, "min_tokens_to_keep": rng.integers(4)}
        attrs |= {"custom": rng.integers(2)}

    def bound(draw: Draw) -> list[Rounded | None]:
        """Of scores, to which logarithms and exponentials are close."""
        outputs = expected(draw.node, draw.inputs)
        near = [Rounded.exact(y, np.dtype("float32")) for y in outputs]
        close = [y.inexact(1e-5 * (4 + np.abs(y.value))) for y in near]
        return [close[i] if i in (2, 7, 9) else None for i in range(len(outputs))]

    return Draw(SEARCH_STEP, inputs, attrs, bound, outputs=3 + STATE, is_formula=True)


@draws("NegativeLogLikelihoodLoss")
def _loss(rng: Source, name: str) -> Draw:
    dtype, classes = rng.pick(*FLOATS), rng.size(33)
    outer, *inner = rng.dims(rng.integers(1, 4), 3000 // classes, least=0)
    x = rng.numbers((outer, classes, *inner), dtype)
    target = rng.integers(0, classes, (outer, *inner)).astype(rng.pick("int32", "int64"))
    attrs: dict[str, Any] = {"reduction": rng.pick("none", "sum", "mean")}
    if rng.chance(0.5):
        attrs["ignore_index"] = int(rng.pick(-1, 0, classes, -100))
        target[rng.random(target.shape) < 0.2] = attrs["ignore_index"]
    weights = 0.1 + rng.random(classes).astype(dtype) if rng.chance(0.5) else None

    def bound(draw: Draw) -> list[Rounded | None]:
        (value,), (most,) = draw.wide(), draw.wide(np.abs)
        terms = 2 * target.size + 4 if attrs["reduction"] != "none" else 1
        own = gamma(terms, unit(draw.dtype)) * np.abs(most)
        return [Rounded.exact(0, draw.dtype).summed(value, own, np.abs(most), terms)]

    return Draw(name, [x, target, weights], attrs, bound)


@draws("MaxUnpool")
def _max_unpool(rng: Source, name: str) -> Draw:
    rank = int(rng.integers(1, 4))
    dims = (rng.size(3), rng.size(5), *rng.dims(rank, 200))
    kernel = [int(rng.integers(1, 4)) for _ in range(rank)]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": kernel}
    size = math.prod(dims) * math.prod(kernel)
    x = rng.numbers(dims, rng.pick(*FLOATS, "float16"), 0.3)
    # A place may come twice.
    places = rng.integers(0, size, dims)
    if rng.chance(0.1):
        places.flat[rng.integers(places.size)] = rng.pick(size, -1, np.iinfo(np.int64).min)
    return Draw(name, [x, places], attrs)


@draws("TensorScatter")
def _tensor_scatter(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(2, 5), 3000)
    axis = int(rng.integers(1, len(dims)))
    length = int(rng.integers(1, dims[axis] + 1))
    x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
    update = rng.numbers((*dims[:axis], length, *dims[axis + 1 :]), x.dtype.name, 0.3)
    mode = rng.pick("linear", "circular")
    room = dims[axis] - length if mode == "linear" and rng.chance(0.9) else 3 * dims[axis]
    starts = rng.integers(-room if mode == "circular" else 0, room + 1, dims[0])
    inputs = [x, update, starts.astype(rng.pick(*WHOLE)) if rng.chance(0.8) else None]
    return Draw(name, inputs, {"axis": axis - len(dims) * int(rng.chance(0.5)), "mode": mode})
