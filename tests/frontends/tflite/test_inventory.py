"""Which operators LiteRT has, and that each of them is there or has a reason why it is not."""

from __future__ import annotations

import pytest

from penstock.frontends.tflite.conversion import RULES
from tests.support.tflite_models import model, subgraph
from tests.support.tflite_operators import LITERT_LACKS, REASONS, names


def test_operators_that_are_not_there_have_a_reason() -> None:
    wanted = {*names(False), *names(True)} - LITERT_LACKS
    assert wanted - set(RULES) == set(REASONS)


def test_rules_are_of_operators_of_the_schema() -> None:
    custom = {"Convolution2DTransposeBias", "NumericVerify", "TFLite_Detection_PostProcess"}
    assert set(RULES) <= {*names(False), *names(True), *(f"CUSTOM:{name}" for name in custom)}


def test_list_of_what_litert_lacks_is_true() -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    resolver = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES

    def has(name: str) -> bool:
        for version in range(1, 6):
            graph = subgraph({"x": ("float32", [2])}, [(name, ["x"], ["y"], None)], ["y"])
            file = model([graph], versions={name: version})
            try:
                litert.Interpreter(model_content=file, experimental_op_resolver_type=resolver)
            except (ValueError, RuntimeError) as error:
                if "find op for builtin" in str(error):
                    continue
            return True
        return False

    assert {name for name in names(False) if not has(name)} == LITERT_LACKS
