"""The table of which module registers which operation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ops.families import INDEX, MODULES

PROGRAM = """
import pkgutil
import sys
from importlib import import_module

import penstock.ops
from penstock.ops.families import MODULES
from penstock.ops.registry import _REGISTRY

for module in sorted(set(MODULES.values()), reverse={reverse}):
    import_module(module)
    print(*[key for key, home in MODULES.items() if home == module and key not in _REGISTRY])
for module in pkgutil.walk_packages(penstock.ops.__path__, "penstock.ops."):
    import_module(module.name)
print(*set(_REGISTRY) - set(MODULES))
"""


@pytest.mark.parametrize("reverse", [False, True])
def test_modules_register_just_the_operations_that_the_table_says(reverse: bool) -> None:
    program = PROGRAM.format(reverse=reverse)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [], "run 'make kernels', which writes the table"


def test_operation_of_a_family_is_found_by_importing_its_module_alone() -> None:
    program = """
import sys
from pathlib import Path
from penstock.ops import find
assert find("Celu").name == "Celu" and find("Attention", "com.microsoft") is not None
assert find("Celu", "nowhere") is None
print(*[name for name in sys.modules if name.startswith("penstock.ops.") and name.count(".") > 2])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.split())
    families = imported & set(MODULES.values())
    assert families <= {
        "penstock.ops.onnx.activation",
        "penstock.ops.onnx.arithmetic",
        "penstock.ops.onnx.attention",
        "penstock.ops.microsoft.attention",
    }


def test_index_is_what_the_tool_writes() -> None:
    program = "from tools.families import operations_text; print(operations_text(), end='')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert Path(INDEX).read_text() == done.stdout, "run 'make kernels', which writes it"
