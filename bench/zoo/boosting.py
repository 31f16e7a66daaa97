"""Gradient-boosted trees of LightGBM and XGBoost, as onnxmltools writes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.zoo.store import Case, Product, Recipe

ROWS, FEATURES, BATCH = 300, 10, 200

# The estimator, and its arguments; what differs from its defaults names the recipe.
LIGHTGBM: list[tuple[str, dict[str, Any]]] = [
    ("LGBMClassifier", {"n_estimators": 1}),
    ("LGBMClassifier", {"n_estimators": 20}),
    ("LGBMClassifier", {"n_estimators": 100, "num_leaves": 15}),
    ("LGBMClassifier", {"n_estimators": 20, "classes": 2}),
    ("LGBMClassifier", {"n_estimators": 20, "classes": 5}),
    ("LGBMClassifier", {"n_estimators": 20, "boosting_type": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}),
    ("LGBMClassifier", {"n_estimators": 20, "objective": "multiclassova"}),
    ("LGBMRegressor", {"n_estimators": 1}),
    ("LGBMRegressor", {"n_estimators": 20}),
    ("LGBMRegressor", {"n_estimators": 100, "num_leaves": 31}),
    ("LGBMRegressor", {"n_estimators": 20, "objective": "poisson"}),
    ("LGBMRegressor", {"n_estimators": 20, "objective": "quantile"}),
    ("LGBMRegressor", {"n_estimators": 20, "objective": "gamma"}),
    ("LGBMRegressor", {"n_estimators": 20, "objective": "tweedie"}),
    ("LGBMRegressor", {"n_estimators": 20, "boosting_type": "dart"}),
    ("LGBMRanker", {"n_estimators": 20}),
]  # fmt: skip
XGBOOST: list[tuple[str, dict[str, Any]]] = [
    ("XGBClassifier", {"n_estimators": 1}),
    ("XGBClassifier", {"n_estimators": 20}),
    ("XGBClassifier", {"n_estimators": 100, "max_depth": 3}),
    ("XGBClassifier", {"n_estimators": 20, "classes": 2}),
    ("XGBClassifier", {"n_estimators": 20, "classes": 5}),
    ("XGBClassifier", {"n_estimators": 20, "booster": "dart"}),
    ("XGBRegressor", {"n_estimators": 1}),
    ("XGBRegressor", {"n_estimators": 20}),
    ("XGBRegressor", {"n_estimators": 100, "max_depth": 6}),
    ("XGBRegressor", {"n_estimators": 20, "objective": "count:poisson"}),
    ("XGBRegressor", {"n_estimators": 20, "objective": "reg:gamma"}),
    ("XGBRegressor", {"n_estimators": 20, "objective": "reg:logistic"}),
    ("XGBRegressor", {"n_estimators": 20, "base_score": 0.2}),
    ("XGBRFClassifier", {"n_estimators": 20}),
    ("XGBRFRegressor", {"n_estimators": 20}),
    ("XGBRanker", {"n_estimators": 20}),
]


def recipes(group: str) -> Iterator[Recipe]:
    warnings.simplefilter("ignore")
    lightgbm = group == "lightgbm"
    for name, arguments in LIGHTGBM if lightgbm else XGBOOST:
        words = [f"{k}_{v}" for k, v in arguments.items() if not k.startswith("bagging")]
        title = "_".join([name, *words]).replace(":", "_")
        yield Recipe(title, partial(_product, name, arguments, lightgbm))
        if lightgbm and name == "LGBMClassifier":
            yield Recipe(f"{title}_zipmap", partial(_product, name, arguments, True, zipmap=True))


def _product(name: str, arguments: dict[str, Any], lightgbm: bool, **options: bool) -> Product:
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    given = dict(arguments)
    classes = given.pop("classes", 3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = np.nan  # both have a branch for missing values
    score = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 1:] ** 2).mean(1)
    y = np.digitize(score, np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1]))
    if name.endswith("Regressor"):
        y = np.clip(score / 10, 0.01, 0.99)
    library = __import__("lightgbm" if lightgbm else "xgboost")
    quiet = {"verbose": -1} if lightgbm else {}
    estimator = getattr(library, name)(**given, **quiet, random_state=0, n_jobs=1)
    estimator.fit(x, y, **({"group": [30] * 10} if name.endswith("Ranker") else {}))
    convert = onnxmltools.convert_lightgbm if lightgbm else onnxmltools.convert_xgboost
    if lightgbm:
        options = {"zipmap": False, **options}
    model = convert(estimator, initial_types=[("X", FloatTensorType([None, FEATURES]))], **options)
    cases = {}
    for case, rows in (("row", x[:1]), ("batch", x[:BATCH])):
        answers = [estimator.predict(rows)]
        if name.endswith("Classifier"):
            answers.append(estimator.predict_proba(rows))
        cases[case] = Case({"X": rows}, answers)
    return Product(model.SerializeToString(), cases)
