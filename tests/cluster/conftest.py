"""One Ray for each process of tests, and one cluster that tests share which leave it whole."""

from __future__ import annotations

import os

import pytest

import penstock as ps

pytest.importorskip("ray", reason="tests of clusters need Ray: pip install penstock-runtime[ray]")


@pytest.fixture(scope="session")
def ray_started():
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home folder
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    if ray.is_initialized():  # by this fixture, which tests of other folders import
        yield
        return
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=256 << 20,
        _system_config={"prestart_worker_first_driver": False},  # no worker before it is needed
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster(ray_started):
    with ps.Cluster(2) as cluster:
        yield cluster
