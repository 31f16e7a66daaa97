"""Models of scikit-learn, as skl2onnx writes them.

Every estimator that skl2onnx has a converter for is fitted with its own defaults, but for
``ARGUMENTS``, to one of a few small data sets. Classifiers are written with probabilities as a list
of maps, which is skl2onnx's default, and as an array; the others for float32 and for float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.zoo.store import Case, Product, Recipe

ROWS, FEATURES, CLASSES, BATCH = 200, 10, 3, 200

# Fewer trees, iterations and components than by default, so that models are small.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdaBoostClassifier": {"n_estimators": 10},
    "AdaBoostRegressor": {"n_estimators": 10},
    "AdditiveChi2Sampler": {"sample_steps": 2},
    "BaggingClassifier": {"n_estimators": 5},
    "BaggingRegressor": {"n_estimators": 5},
    "BernoulliRBM": {"n_components": 8},
    "BisectingKMeans": {"n_clusters": 4},
    "CCA": {"n_components": 1},
    "DictionaryLearning": {"n_components": 5},
    "ExtraTreesClassifier": {"n_estimators": 20},
    "ExtraTreesRegressor": {"n_estimators": 20},
    "FastICA": {"n_components": 4},
    "GaussianMixture": {"n_components": 3},
    "BayesianGaussianMixture": {"n_components": 3},
    "GaussianRandomProjection": {"n_components": 5},
    "GradientBoostingClassifier": {"n_estimators": 20},
    "GradientBoostingRegressor": {"n_estimators": 20},
    "HistGradientBoostingClassifier": {"max_iter": 20},
    "HistGradientBoostingRegressor": {"max_iter": 20},
    "IncrementalPCA": {"n_components": 4},
    "IsolationForest": {"n_estimators": 20},
    "KBinsDiscretizer": {"n_bins": 4, "encode": "ordinal", "quantile_method": "averaged_inverted_cdf"},
    "KMeans": {"n_clusters": 4},
    "KernelPCA": {"n_components": 4, "kernel": "rbf"},
    "MLPClassifier": {"hidden_layer_sizes": (32, 16), "max_iter": 30},
    "MLPRegressor": {"hidden_layer_sizes": (32, 16), "max_iter": 30},
    "MiniBatchKMeans": {"n_clusters": 4},
    "NMF": {"n_components": 4},
    "NuSVC": {"nu": 0.3, "probability": True},
    "PCA": {"n_components": 4},
    "PLSRegression": {"n_components": 3},
    "LocalOutlierFactor": {"novelty": True},
    "RadiusNeighborsClassifier": {"radius": 5.0},
    "RadiusNeighborsRegressor": {"radius": 5.0},
    "QuantileTransformer": {"n_quantiles": 20},
    "RANSACRegressor": {"min_samples": 30},
    "RandomForestClassifier": {"n_estimators": 20},
    "RandomForestRegressor": {"n_estimators": 20},
    "RandomTreesEmbedding": {"n_estimators": 5},
    "SVC": {"probability": True},
    "SelectKBest": {"k": 4},
    "SelectPercentile": {"percentile": 40},
    "SparseRandomProjection": {"n_components": 5},
    "TruncatedSVD": {"n_components": 4},
}  # fmt: skip

# Estimators of others: what they are made of.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "CalibratedClassifierCV": lambda: {"estimator": _new("LogisticRegression")},
    "ClassifierChain": lambda: {"estimator": _new("LogisticRegression")},
    "FeatureUnion": lambda: {"transformer_list": [("a", _new("StandardScaler")), ("b", _new("PCA"))]},
    "GridSearchCV": lambda: {"estimator": _new("Ridge"), "param_grid": {"alpha": [0.1, 1.0]}},
    "MultiOutputClassifier": lambda: {"estimator": _new("LogisticRegression")},
    "MultiOutputRegressor": lambda: {"estimator": _new("Ridge")},
    "OneVsOneClassifier": lambda: {"estimator": _new("LogisticRegression")},
    "OneVsRestClassifier": lambda: {"estimator": _new("LogisticRegression")},
    "OutputCodeClassifier": lambda: {"estimator": _new("LogisticRegression")},
    "RFE": lambda: {"estimator": _new("LinearRegression"), "n_features_to_select": 4},
    "RFECV": lambda: {"estimator": _new("LinearRegression")},
    "RegressorChain": lambda: {"estimator": _new("Ridge")},
    "SelectFromModel": lambda: {"estimator": _new("Ridge")},
    "SequentialFeatureSelector": lambda: {"estimator": _new("Ridge")},
    "StackingClassifier": lambda: {"estimators": _several("GaussianNB", "DecisionTreeClassifier")},
    "StackingRegressor": lambda: {"estimators": _several("Ridge", "DecisionTreeRegressor")},
    "TransformedTargetRegressor": lambda: {"regressor": _new("Ridge")},
    "VotingClassifier": lambda: {"estimators": _several("GaussianNB", "DecisionTreeClassifier"), "voting": "soft", "flatten_transform": False},
    "TunedThresholdClassifierCV": lambda: {"estimator": _new("LogisticRegression")},
    "VotingRegressor": lambda: {"estimators": _several("Ridge", "DecisionTreeRegressor")},
}  # fmt: skip

WHOLE_NUMBERS = {"CategoricalNB", "OneHotEncoder", "OrdinalEncoder", "TargetEncoder"}
POSITIVE = {
    "AdditiveChi2Sampler", "ComplementNB", "GammaRegressor", "LatentDirichletAllocation",
    "MiniBatchNMF", "MultinomialNB", "NMF", "PoissonRegressor", "TweedieRegressor",
}  # fmt: skip
SEVERAL_TARGETS = ("MultiTask", "MultiOutput", "ClassifierChain", "RegressorChain")
TEXTS = ["the cat sat on the mat", "a dog ate my homework!", "Cats and dogs don't mix",
         "", "to be or not to be", "naïve café", "one two three four five", "the the the"]  # fmt: skip


@dataclass(frozen=True)
class Data:
    """What an estimator is fitted to."""

    x: np.ndarray
    y: np.ndarray


def recipes(_: str) -> Iterator[Recipe]:
    warnings.simplefilter("ignore")
    from skl2onnx import supported_converters
    from sklearn.base import ClassifierMixin
    from sklearn.utils import all_estimators

    _accept_numpy_integers()
    converters = set(supported_converters(from_sklearn=True))
    for name, estimator in all_estimators():
        if name not in converters or name in TEXT_ESTIMATORS:
            continue
        make = partial(_fitted, name)
        if issubclass(estimator, ClassifierMixin) and name not in ("LinearSVC", "NearestCentroid"):
            yield Recipe(name, partial(_product, make, {"zipmap": True}))
            yield Recipe(f"{name}_array", partial(_product, make, {"zipmap": False}))
        else:
            yield Recipe(name, partial(_product, make, {}))
            yield Recipe(f"{name}_double", partial(_product, make, {}, np.float64))
    yield from _others()


def _accept_numpy_integers() -> None:
    """Make onnx take attributes that are lists with NumPy's integers, as its earlier versions did:
    skl2onnx writes those of HistGradientBoosting so."""
    from onnx import helper

    make_attribute = helper.make_attribute

    def make(key: str, value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(value, list):
            value = [item.item() if isinstance(item, np.generic) else item for item in value]
        return make_attribute(key, value, *arguments, **keywords)

    helper.make_attribute = make


def _new(name: str, **arguments: Any) -> Any:
    from sklearn.utils import all_estimators

    parts = PARTS[name]() if name in PARTS else {}
    made = dict(all_estimators())[name](**{**ARGUMENTS.get(name, {}), **parts, **arguments})
    if "random_state" in made.get_params(deep=False):
        made.set_params(random_state=0)
    return made


def _several(*names: str) -> list[tuple[str, Any]]:
    return [(name.lower(), _new(name)) for name in names]


def _data(name: str) -> Data:
    """Rows that have something to do with their targets, of the kind that ``name`` takes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES))
    if name in POSITIVE:
        x = np.abs(x) / 4
    if name in WHOLE_NUMBERS:
        x = rng.integers(0, 4, (ROWS, FEATURES))
    if name == "IsotonicRegression":
        x = x[:, :1]
    score = x[:, :3].sum(1) + (x**2).mean(1) + 0.1 * rng.standard_normal(ROWS)
    y: np.ndarray = np.abs(score) + 0.1
    if name.endswith(("Classifier", "ClassifierCV", "NB", "SVC", "ClassifierChain")) or name in (
        "LogisticRegression", "LogisticRegressionCV", "LinearDiscriminantAnalysis", "Perceptron",
        "QuadraticDiscriminantAnalysis", "NearestCentroid", "LabelPropagation", "LabelSpreading",
        "NeighborhoodComponentsAnalysis", "SelectKBest", "SelectPercentile", "SelectFdr",
        "SelectFpr", "SelectFwe", "GenericUnivariateSelect", "TunedThresholdClassifierCV",
    ):  # fmt: skip
        y = np.digitize(score, np.quantile(score, [1 / 3, 2 / 3])).astype(np.int64)
    if name in ("GaussianProcessClassifier", "TunedThresholdClassifierCV"):
        y = (y > 0).astype(np.int64)  # skl2onnx converts these for two classes only
    if name.startswith(SEVERAL_TARGETS) or name in SEVERAL_TARGETS:
        other = y[::-1] if name != "ClassifierChain" else y > 0
        y = np.stack([y > 0 if name == "ClassifierChain" else y, other], 1)
    return Data(x, y)


def _fitted(name: str, dtype: type = np.float32, **arguments: Any) -> tuple[Any, np.ndarray]:
    """The estimator, and rows to feed it."""
    estimator, data = _new(name, **arguments), _data(name)
    x = data.x.astype(np.int64 if name in WHOLE_NUMBERS else dtype)
    estimator.fit(x, data.y)
    return estimator, x


def _product(make: Callable, options: dict[str, Any], dtype: type = np.float32) -> Product:
    """What skl2onnx makes of the estimator that ``make`` gives, fitted to rows of ``dtype``."""
    from skl2onnx import to_onnx

    estimator, x = make(dtype=dtype)
    chosen = {id(estimator): options} if options else None
    opset = {"": 17, "ai.onnx.ml": 3} if "IsolationForest" in type(estimator).__name__ else None
    model = to_onnx(estimator, x[:1], options=chosen, target_opset=opset)
    cases = {"row": x[:1], "batch": x[:BATCH]}
    return Product(
        model.SerializeToString(),
        {name: Case({"X": rows}, answers(estimator, rows)) for name, rows in cases.items()},
    )


def answers(estimator: Any, rows: Any) -> list[Any] | None:
    """What scikit-learn answers, in the order of skl2onnx's outputs; None where that is unknown."""
    from sklearn.pipeline import Pipeline

    last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    for methods in (("predict", "predict_proba"), ("predict", "decision_function"), ("predict",), ("transform",)):  # fmt: skip
        if all(hasattr(estimator, method) for method in methods):
            if type(last).__name__ in UNLIKE:
                return None
            outputs = [getattr(estimator, method)(rows) for method in methods]
            return [o.toarray() if hasattr(o, "toarray") else o for o in outputs]
    return None


# Their ONNX models have other outputs than predict, predict_proba or decision_function give.
UNLIKE = {
    "KMeans", "MiniBatchKMeans", "BisectingKMeans", "MultiOutputClassifier", "GaussianMixture",
    "BayesianGaussianMixture", "OneClassSVM", "LocalOutlierFactor", "ClassifierChain",
}  # fmt: skip
TEXT_ESTIMATORS = {
    "CountVectorizer", "TfidfVectorizer", "TfidfTransformer", "FeatureHasher", "DictVectorizer",
    "LabelBinarizer", "LabelEncoder", "MultiLabelBinarizer", "Pipeline", "ColumnTransformer",
    "HashingVectorizer", "PatchExtractor", "TraceableCountVectorizer", "TraceableTfidfVectorizer",
}  # fmt: skip


def _others() -> Iterator[Recipe]:
    """What takes options of its own, several columns, or text."""
    for name in ("KNeighborsClassifier", "KNeighborsRegressor", "GaussianProcessRegressor"):
        yield Recipe(f"{name}_cdist", partial(_product, partial(_fitted, name), {"optim": "cdist"}))
    variants: list[tuple[str, dict[str, Any]]] = [
        ("SVC", {"kernel": "linear"}), ("SVC", {"kernel": "poly"}), ("SVC", {"kernel": "sigmoid"}),
        ("SVR", {"kernel": "linear"}), ("SVR", {"kernel": "poly"}),
        ("KNeighborsRegressor", {"weights": "distance"}),
        ("KNeighborsRegressor", {"metric": "manhattan"}),
        ("RandomForestRegressor", {"n_estimators": 100}),
        ("RandomForestClassifier", {"n_estimators": 100, "max_depth": 5}),
        ("GradientBoostingRegressor", {"n_estimators": 100, "max_depth": 5}),
        ("HistGradientBoostingRegressor", {"max_iter": 100}),
        ("DecisionTreeRegressor", {"max_depth": 3}), ("IsolationForest", {"n_estimators": 100}),
        ("MLPRegressor", {"activation": "tanh"}), ("MLPRegressor", {"activation": "logistic"}),
        ("PolynomialFeatures", {"degree": 3}), ("KBinsDiscretizer", {"encode": "onehot-dense"}),
        ("SimpleImputer", {"strategy": "median", "add_indicator": False}),
        ("Normalizer", {"norm": "l1"}),
        ("QuantileTransformer", {"n_quantiles": 100}),
        ("OneHotEncoder", {"sparse_output": False}),
        ("StandardScaler", {"with_mean": False}), ("KernelPCA", {"kernel": "poly"}),
        ("PCA", {"whiten": True}), ("LinearSVC", {"C": 10.0}),
    ]  # fmt: skip
    for name, arguments in variants:
        last = "_".join(str(value) for value in arguments.values())
        make = partial(_fitted, name, **arguments)
        yield Recipe(f"{name}_{last}", partial(_product, make, {}))
    for name, make in PIPELINES.items():
        yield Recipe(f"pipeline_{name}", partial(_pipeline, make))
    for name, make in TEXT_PIPELINES.items():
        yield Recipe(f"text_{name}", partial(_text, make))


def _columns() -> Any:
    from sklearn.compose import ColumnTransformer

    return ColumnTransformer(
        [
            ("numbers", _new("StandardScaler"), [0, 1, 2, 3]),
            ("bins", _new("KBinsDiscretizer"), [4, 5]),
            ("rest", "passthrough", [6, 7, 8, 9]),
        ]
    )


def _piped(*names: str) -> Callable[[], Any]:
    def make() -> Any:
        from sklearn.pipeline import make_pipeline

        return make_pipeline(*map(_new, names))

    return make


PIPELINES: dict[str, Callable[[], Any]] = {
    "scaler_logistic": _piped("StandardScaler", "LogisticRegression"),
    "scaler_pca_svc": _piped("StandardScaler", "PCA", "SVC"),
    "imputer_scaler_forest": _piped("SimpleImputer", "MinMaxScaler", "RandomForestClassifier"),
    "poly_ridge": _piped("PolynomialFeatures", "StandardScaler", "Ridge"),
    "scaler_mlp": _piped("StandardScaler", "MLPClassifier"),
    "select_knn": _piped("SelectKBest", "KNeighborsClassifier"),
    "quantile_boosting": _piped("QuantileTransformer", "GradientBoostingRegressor"),
    "union_lasso": _piped("FeatureUnion", "Lasso"),
    "power_bayes": _piped("PowerTransformer", "GaussianNB"),
    "bins_tree": _piped("KBinsDiscretizer", "DecisionTreeClassifier"),
    "columns": _columns,
}


def _pipeline(make: Callable[[], Any]) -> Product:
    classes = _data("LogisticRegression")

    def fitted(dtype: type) -> tuple[Any, np.ndarray]:
        return make().fit(classes.x.astype(dtype), classes.y), classes.x.astype(dtype)

    return _product(fitted, {})


def _vectorized(vectorizer: str, last: str | None = None, **arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        from sklearn.feature_extraction import text
        from sklearn.pipeline import make_pipeline

        first = getattr(text, vectorizer)(**arguments)
        return make_pipeline(first, _new(last)) if last else make_pipeline(first)

    return make


TEXT_PIPELINES: dict[str, Callable[[], Any]] = {
    "count": _vectorized("CountVectorizer"),
    "count_bigrams": _vectorized("CountVectorizer", ngram_range=(1, 2)),
    "count_binary": _vectorized("CountVectorizer", binary=True),
    "count_characters": _vectorized("CountVectorizer", analyzer="char", ngram_range=(1, 2)),
    "tfidf": _vectorized("TfidfVectorizer"),
    "tfidf_cased": _vectorized("TfidfVectorizer", lowercase=False, sublinear_tf=True),
    "tfidf_stop_words": _vectorized("TfidfVectorizer", stop_words=["the", "to"]),
    "tfidf_logistic": _vectorized("TfidfVectorizer", "LogisticRegression"),
    "count_naive_bayes": _vectorized("CountVectorizer", "MultinomialNB"),
    "tfidf_svd": _vectorized("TfidfVectorizer", "TruncatedSVD"),
}


def _text(make: Callable[[], Any]) -> Product:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType

    pipeline = make().fit(TEXTS, np.arange(len(TEXTS)) % 2)
    # By default an English locale, which ONNX Runtime needs to be there.
    model = to_onnx(
        pipeline,
        initial_types=[("X", StringTensorType([None, 1]))],
        options={id(pipeline.steps[0][1]): {"locale": "C"}},
    )
    cases = {}
    for name, texts in (("row", TEXTS[:1]), ("batch", TEXTS * 8)):
        rows = np.array(texts, object).reshape(-1, 1)
        cases[name] = Case({"X": rows}, answers(pipeline, texts))
    return Product(model.SerializeToString(), cases)
