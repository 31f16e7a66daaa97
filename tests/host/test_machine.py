"""The name of the machine, and the folder of measurements."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from penstock.host.machine import cache_folder, machine_name


@pytest.mark.parametrize("caches", [None, "", "absolute"])
def test_cache_folder_is_that_of_platformdirs(monkeypatch, tmp_path, caches):
    from platformdirs import user_cache_dir

    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if caches is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", caches and str(tmp_path / caches))
    assert cache_folder() == user_cache_dir("penstock", appauthor=False)


@pytest.mark.parametrize("caches", [None, "absolute"])
def test_cache_folder_on_macos_is_that_of_platformdirs(monkeypatch, tmp_path, caches):
    from platformdirs.macos import MacOS

    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    if caches is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / caches))
    assert cache_folder() == MacOS("penstock", appauthor=False).user_cache_dir


@pytest.mark.parametrize("local", [None, "local"])
def test_cache_folder_on_windows_is_that_of_platformdirs(monkeypatch, tmp_path, local):
    from platformdirs import windows

    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "win32")
    folder = str(tmp_path / (local or "AppData/Local"))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCALAPPDATA", folder)
    monkeypatch.setattr(windows, "get_win_folder", lambda name: folder)
    assert cache_folder() == windows.Windows("penstock", appauthor=False).user_cache_dir


def test_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    """As the base directory specification of freedesktop.org says."""
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    if sys.platform == "linux":
        assert cache_folder() == str(tmp_path / ".cache" / "penstock")


def test_machine_name_has_library_versions():
    machine = machine_name()
    for part in (np.__version__, f"Python {sys.version_info.major}.", "Penstock ", " cores"):
        assert part in machine
    assert len(machine) < 300
