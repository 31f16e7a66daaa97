"""``penstock.ray_deployment``: the server as a Ray Serve application. Ray Serve starts, scales and
replaces its replicas, each of which has the models, with their queues and batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError, wrong_type

MAX_REQUEST_BYTES = 64 << 20


def ray_deployment(
    models: str | Path | Mapping[str, str | Path],
    *,
    deployment: Mapping[str, Any] | None = None,
    max_bytes: int = MAX_REQUEST_BYTES,
    timeout: float = 60.0,
    **options: Any,
) -> Any:
    """Return an application for ``ray.serve.run`` that serves one or several models by the Open
    Inference Protocol, as ``penstock serve`` does. Raises ``PenstockError`` without Ray Serve
    (``pip install 'ray[serve]' penstock-runtime[serve]``).

    Args:
        models: The path of a model, or paths by name, which each process reads.
        deployment: Options of ``ray.serve.deployment``, such as ``num_replicas``.
        max_bytes: The maximum bytes of a request.
        timeout: The maximum seconds of a request.
        options: Options of ``penstock.Replicas`` in each process.
    """
    if isinstance(models, str | Path):
        models = {Path(models).stem: models}
    if not isinstance(models, Mapping) or not models:
        raise wrong_type("models", models, "a path, or paths by name")
    try:
        from ray import serve
    except ImportError as error:
        raise PenstockError(
            f"Ray Serve is needed ({error}): pip install 'ray[serve]' penstock-runtime[serve]"
        ) from error
    paths = {name: Path(path).absolute() for name, path in models.items()}
    build = partial(_application, paths, options, max_bytes, timeout)
    given = {"name": "penstock", **(deployment or {})}

    def built() -> Any:  # Ray Serve looks whether it is a function
        return build()

    return serve.deployment(**given)(serve.ingress(built)(_Models)).bind()


class _Models:
    """A replica of Ray Serve; its application holds the models."""


def _application(
    paths: Mapping[str, Path], options: Mapping[str, Any], max_bytes: int, timeout: float
) -> Any:
    """Return the server of the models at ``paths``, in the process of a replica."""
    from penstock.serving.app import Server
    from penstock.serving.replicas import Replicas
    from penstock.serving.repository import ModelRepository

    repository = ModelRepository(paths, partial(Replicas, **options))
    return Server(repository, max_bytes=max_bytes, timeout=timeout).app
