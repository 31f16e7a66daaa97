"""Options of ``compile`` from the configuration of an nnpackage, in the keys of onert."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.core.errors import shortened, warn
from penstock.ir.graph import Model, Node

_PLACE = "OP_BACKEND_"
_ANY = "cpu"  # onert's backend that stands for all of ours, since these run on processors
_SWITCH = {"0": False, "1": True}
_VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "CPU_MEMORY_PLANNER": (
        "memory_planner",
        {"Bump": "bump", "FirstFit": "first_fit", "WIC": "wic"},
    ),
    "EXECUTOR": (
        "executor",
        {name.capitalize(): name for name in ("linear", "dataflow", "parallel")},
    ),
    "PROFILING_MODE": ("autotune", _SWITCH),
}


def package_options(model: Model, available: Collection[str]) -> dict[str, Any]:
    """Return the options of a model's file, by name, given the ``available`` backends. Warns of
    keys and values that have no meaning."""
    nodes = [*model.graph.walk()]
    options: dict[str, Any] = {}
    ignored = []
    for key, text in model.options.items():
        meaning = _meaning(key, text, nodes, available)
        if meaning is None:
            ignored.append(f"{key}={text}")
        elif isinstance(meaning.get("place"), dict):
            options.setdefault("place", {}).update(meaning["place"])
        else:
            options |= meaning
    if ignored:
        entries = shortened(", ".join(ignored))
        warn(
            f"the configuration of {model.path} has {entries}, which is ignored: the key is "
            "unknown, or does not have this value here"
        )
    return options


def _meaning(
    key: str, text: str, nodes: Sequence[Node], available: Collection[str]
) -> dict[str, Any] | None:
    """Return the options that ``key=text`` stands for, or ``None`` if it is not understood."""
    if key in _VALUES:
        name, values = _VALUES[key]
        return {name: values[text]} if text in values else None
    if key == "NUM_THREADS":
        valid = text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9
        return {"threads": int(text)} if valid else None
    if key == "USE_SCHEDULER" or (key == "TRACING_MODE" and text == "0"):
        return {}  # costs always decide, and a run is traced if its caller wants a trace
    if key in ("BACKENDS", "OP_BACKEND_ALLOPS"):
        names = text.split(";")
        if _ANY in names:
            return {}
        return {"backends": tuple(names)} if set(names) <= set(available) else None
    if key == "OP_BACKEND_MAP":
        return _places_by_number(text, nodes, available)
    if key.startswith(_PLACE):
        operation = key.removeprefix(_PLACE)
        if text == _ANY:
            return {}
        if text in available and any(node.op.name == operation for node in nodes):
            return {"place": {operation: text}}
    return None


def _places_by_number(
    text: str, nodes: Sequence[Node], available: Collection[str]
) -> dict[str, Any] | None:
    """Return the backends of operators by numbers in the first subgraph, as in ``0=cpu;2=numpy``.
    Operator 2 of an only model is the node ``NAME_2``."""
    parts = [node.name.rpartition("_") for node in nodes]
    names = {number: f"{name}_{number}" for name, _, number in parts if name.isupper()}
    places = {}
    for entry in text.split(";"):
        number, _, backend = entry.partition("=")
        if backend not in (_ANY, *available) or number not in names:
            return None
        if backend != _ANY:
            places[f"node:{names[number]}"] = backend
    return {"place": places} if places else {}
