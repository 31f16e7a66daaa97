"""The command cache lists and removes what compile(cache=...) keeps."""

from __future__ import annotations

import penstock as ps
from tests.support.command_line import as_json, call


def test_cache_lists_the_sessions_that_are_kept(model, tmp_path):
    folder = tmp_path / "kept"
    assert as_json("cache", "list", "--folder", str(folder))["sessions"] == []
    ps.compile(model, cache=folder, shapes={"x": (2, 3)}).close()
    (entry,) = as_json("cache", "list", "--folder", str(folder))["sessions"]
    (path,) = [path for path in folder.rglob("*") if path.name == entry["file"]]
    assert entry["bytes"] == path.stat().st_size
    assert entry["file"] in call("cache", "list", "--folder", str(folder)).output


def test_cache_clear_removes_them_and_says_how_much_that_frees(model, tmp_path):
    folder = tmp_path / "kept"
    ps.compile(model, cache=folder, shapes={"x": (2, 3)}).close()
    (entry,) = as_json("cache", "list", "--folder", str(folder))["sessions"]
    assert as_json("cache", "clear", "--folder", str(folder))["freed"] >= entry["bytes"]
    assert as_json("cache", "list", "--folder", str(folder))["sessions"] == []
    assert "freed" in call("cache", "clear", "--folder", str(folder)).output


def test_cache_with_another_action_is_a_usage_error(tmp_path):
    assert call("cache", "grow", "--folder", str(tmp_path)).exit_code == 2
