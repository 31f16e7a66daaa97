"""Settings of the OpenMP runtime: ours where the user has none."""

from __future__ import annotations

import os

import pytest

from penstock.host.native import is_tuned, openmp_settings

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_settings_are_there_within_the_block_alone():
    with pytest.raises(LookupError), openmp_settings():
        assert os.environ["OMP_WAIT_POLICY"] == "active"
        assert int(os.environ["GOMP_SPINCOUNT"]) > 0
        raise LookupError
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()


def test_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with openmp_settings():
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
        assert "GOMP_SPINCOUNT" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize("name", NAMES)
def test_any_setting_of_the_user_counts_as_tuning(monkeypatch, name):
    assert not is_tuned()
    monkeypatch.setenv(name, "1")
    assert is_tuned()
