"""Names of ONNX Runtime that have no counterpart: using one raises, and says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

Class = TypeVar("Class", bound=type)

_PROVIDERS = "there are no execution providers to load: models run on Penstock's own backends"
_COMPILED = "penstock.compile(model).save(path) keeps a compiled model, in a format of Penstock's"
_SPARSE = "feed dense tensors"
_ADAPTER = "put the adapter into the model, as peft's merge_and_unload does before an export"
_DEVICES = "values are in the host's memory"

_REASONS = {
    "AdapterFormat": _ADAPTER,
    "LoraAdapter": _ADAPTER,
    "ModelCompiler": _COMPILED,
    "OrtCompileApiFlags": _COMPILED,
    "OrtEpAssignedNode": _PROVIDERS,
    "OrtEpAssignedSubgraph": _PROVIDERS,
    "OrtEpContextData": _COMPILED,
    "OrtEpContextDataBuffer": _COMPILED,
    "OrtExternalInitializerInfo": _COMPILED,
    "OrtSparseFormat": _SPARSE,
    "OrtSyncStream": _DEVICES,
    "SparseTensor": _SPARSE,
    "register_execution_provider_library": _PROVIDERS,
    "unregister_execution_provider_library": _PROVIDERS,
}


def _raising(name: str, reason: str) -> Callable[..., NoReturn]:
    def unavailable(*arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not available on Penstock: {reason}")

    unavailable.__doc__ = f"Not available: {reason}."
    return unavailable


# Classes, also in place of functions, since programs import them to compare types with.
UNAVAILABLE: Mapping[str, type] = {
    name: type(name, (), {"__doc__": f"Not available: {why}.", "__init__": _raising(name, why)})
    for name, why in _REASONS.items()
}


def lacking(reasons: Mapping[str, str]) -> Callable[[Class], Class]:
    """Give a class methods that raise, each with its reason."""

    def add(cls: Class) -> Class:
        for name, reason in reasons.items():
            setattr(cls, name, _raising(f"{cls.__name__}.{name}", reason))
        return cls

    return add


OF_SESSIONS = {
    "create_ortvalue_from_shape_and_type": "OrtValue.ortvalue_from_shape_and_type makes values",
    "get_provider_graph_assignment_info": "penstock.compile(path).explain() shows the plan",
    "get_tuning_results": "penstock profile measures, and keeps costs in the user's cache folder",
    "release_captured_graph": _DEVICES,
    "set_ep_dynamic_options": _PROVIDERS,
    "set_tuning_results": "penstock profile measures, and keeps costs in the user's cache folder",
}
OF_SESSION_OPTIONS = {
    "add_external_initializers_from_files_in_memory": "keep the files beside the model",
    "add_free_dimension_override_by_denotation": "name dims: add_free_dimension_override_by_name",
    "clear_ep_context_data_read_func": _COMPILED,
    "set_ep_context_data_read_func": _COMPILED,
    "set_load_cancellation_flag": "penstock.compile(path, timeout=..., cancel=...) ends loading",
    "set_provider_selection_policy_delegate": _PROVIDERS,
}
OF_RUN_OPTIONS = {"add_active_adapter": _ADAPTER}
OF_VALUES = {"as_sparse_tensor": _SPARSE, "ort_value_from_sparse_tensor": _SPARSE}
