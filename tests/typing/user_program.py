"""A program of a user's, which type checkers accept in strict mode, and whose mistakes they find.

``make lint`` checks it; each ``type: ignore`` marks a mistake, and is itself a mistake if the checker
finds none there. It is not run.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import numpy as np

import penstock as ps


def describe(session: ps.Session) -> list[str]:
    """Names, dims and dtypes of the inputs."""
    texts: list[str] = []
    for port in session.inputs:
        dims = "any" if port.shape is None else "x".join(str(dim) for dim in port.shape)
        texts.append(f"{port.name}: {port.dtype} {dims}")
    return texts


def run(path: str) -> np.ndarray:
    """One run in each way."""
    session = ps.compile(path, executor="linear", precision="float32", threads=2)
    outputs = session.run({"x": [[1, 2, 3]]}, ["y"], timeout=1.0)
    future: Future[dict[str, object]] = session.submit({"x": [[1, 2, 3]]})
    trace = ps.Trace()
    session.run({"x": [[1, 2, 3]]}, trace=trace, observers=[ps.NanGuard()])
    target = np.empty((1, 2), np.float32)
    session.run({"x": [[1, 2, 3]]}, out={"y": target})
    print(describe(session), session.effective.executor, session.stats.plans_made, future)
    y: np.ndarray = outputs["y"]
    return y


class Frame:
    """What DataFrames have in common."""

    columns = ("x",)

    def __getitem__(self, name: str) -> list[list[float]]:
        return [[1, 2, 3]]


def run_table(session: ps.Session) -> dict[str, object]:
    """A run on the columns of a table."""
    return session.run(Frame())


async def serve(session: ps.Session) -> dict[str, object]:
    """A run for asyncio."""
    return await session.arun({"x": [[1, 2, 3]]}, timeout=0.5)


def mistakes(session: ps.Session) -> None:
    """What a checker must find."""
    ps.compile("model.onnx", executor="lineer")  # type: ignore[arg-type]
    ps.compile("model.onnx", precision="bf61")  # type: ignore[arg-type]
    ps.ExpertOptions(memory_planner="worst")  # type: ignore[arg-type]
    ps.compile("model.onnx", thread=2)  # type: ignore[call-arg]
    session.run({"x": 1}, timeout="1")  # type: ignore[arg-type]
    session.submit({"x": 1}, observer=ps.Trace())  # type: ignore[call-arg]
    asyncio.run(session.arun({"x": 1}, timeouts=1))  # type: ignore[call-arg]
