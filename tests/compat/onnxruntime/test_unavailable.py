"""Names of ONNX Runtime without a counterpart."""

from __future__ import annotations

from types import ModuleType

import onnxruntime
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime import unavailable

# Of ONNX Runtime's own installation.
OWN = {"contextlib", "cuda_version", "import_capi_exception", "package_name", "version"}


def test_every_public_name_of_onnxruntime_is_there_or_raises_with_a_reason() -> None:
    modules = {name for name, value in vars(onnxruntime).items() if isinstance(value, ModuleType)}
    names = {name for name in dir(onnxruntime) if not name.startswith("_")} - OWN - modules
    assert [name for name in sorted(names) if not hasattr(ort, name)] == []


@pytest.mark.parametrize("name", unavailable.UNAVAILABLE)
def test_name_that_cannot_be_used_can_be_imported_and_raises(name: str) -> None:
    cls = getattr(ort, name)
    assert not isinstance(3, cls)
    with pytest.raises(NotImplementedError, match=f"{name} is not available on Penstock: "):
        cls("adapter.onnx_adapter")


CLASSES = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "RunOptions", "SessionOptions"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_there_or_raises_with_a_reason(name: str) -> None:
    ours, theirs = getattr(ort, name), getattr(onnxruntime, name)
    made = ours() if name.endswith("Options") else ours
    public = [n for n in dir(theirs) if not n.startswith("_")]
    assert [n for n in public if not hasattr(made, n)] == []


def test_method_that_cannot_be_used_says_what_to_do() -> None:
    with pytest.raises(
        NotImplementedError, match=r"RunOptions\.add_active_adapter .*merge_and_unload"
    ):
        ort.RunOptions().add_active_adapter(None)
    with pytest.raises(NotImplementedError, match="add_free_dimension_override_by_name"):
        ort.SessionOptions().add_free_dimension_override_by_denotation("DATA_BATCH", 1)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Session'"):
        ort.Session  # noqa: B018
