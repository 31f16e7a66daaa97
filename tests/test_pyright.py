"""The user's program is accepted by pyright in strict mode, and its mistakes are found."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.skipif(
    find_spec("basedpyright") is None,
    reason="needs penstock-runtime[pyright], with a Node of its own",
)
def test_user_program_passes_pyright_in_strict_mode(tmp_path: Path) -> None:
    settings = {
        "include": [str(ROOT / "tests" / "typing" / "user_program.py")],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    assert result["summary"]["filesAnalyzed"] == 1
    assert [entry["message"] for entry in result["generalDiagnostics"]] == []
