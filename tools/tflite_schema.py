"""Write ``frontends/tflite/schema.txt`` from the classes of the installed circle-schema package:
``python -m tools.tflite_schema``."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from circle_schema.v0_10 import circle

from penstock.frontends.tflite.flatbuffer import FILE

HEADER = """\
# Tables, unions and operators of TFLite's schema, and of Circle's, which contains it. A table lists
# its fields in the order of their slots, as name:type or name:type=default; "-" is a field of old
# files. Types are those of NumPy, other tables, unions, text, and vectors of these in brackets. A
# union lists tables in the order of their numbers, and says a number that does not follow the last.
"""
_UNIONS = {"details": "QuantizationDetails", "array_segments": "SparseIndexVector"}
_UNIONS |= {"array_indices": "SparseIndexVector"}


def snake_case(name: str) -> str:
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name).lower()


def numbers(enumeration: type) -> dict[str, int]:
    return {k: v for k, v in vars(enumeration).items() if isinstance(v, int) and k != "NONE"}


def fields(module: ModuleType, name: str) -> Iterator[str]:
    """The fields of a table, from what its functions write and its methods read."""
    source = inspect.getsource(module)
    pattern = (
        rf"def {name}Add(\w+)\(builder, \w+\):\s+builder\.Prepend(\w+)Slot\((\d+), .*, (\S+)\)"
    )
    following = 0
    for field, kind, slot, default in re.findall(pattern, source):
        yield from ["-"] * (int(slot) - following)
        following = int(slot) + 1
        key = snake_case(field)
        method = inspect.getsource(getattr(getattr(module, name), field))
        if kind != "UOffsetTRelative":
            default = {"False": "0", "True": "1"}.get(default, default)
            yield f"{key}:{kind.lower()}" + (f"={default}" if float(default) else "")
            continue
        scalar = re.search(r"number_types\.(\w+)Flags, a \+", method)
        table = re.search(r"import (\w+)\n\s+obj = \1\(\)", method)
        if "_tab.Union" in method:
            type_ = _UNIONS.get(key, field)
        elif scalar:
            type_ = f"[{scalar[1].lower()}]"
        elif table:
            type_ = f"[{table[1]}]" if "Vector" in method else table[1]
        else:
            type_ = "[text]" if "Vector" in method else "text"
        yield f"{key}:{type_}"


def entries(names: dict[str, int]) -> Iterator[str]:
    expected = 0
    for name, number in sorted(names.items(), key=lambda item: item[1]):
        yield name if number == expected else f"{name}={number}"
        expected = number + 1


def text() -> str:
    lines = [HEADER]
    unions = ("BuiltinOptions", "BuiltinOptions2", "QuantizationDetails", "SparseIndexVector")
    for info in sorted(pkgutil.iter_modules(circle.__path__), key=lambda info: info.name):
        module = import_module(f"{circle.__name__}.{info.name}")
        if info.name == "BuiltinOperator" or info.name in unions:
            role = "union" if info.name in unions else "operators"
            lines.append(" ".join([role, info.name, *entries(numbers(getattr(module, info.name)))]))
        elif hasattr(module, "Start"):
            lines.append(" ".join(["table", info.name, *fields(module, info.name)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(FILE).write_text(text())
