"""An operation that takes its time and no core, as a kernel on a device does, for clusters of more
workers than this machine has cores."""

from __future__ import annotations

import time

import numpy as np

from penstock.extend import Kernel, Node, Types, operator, same_type

DOMAIN = "bench"


@operator("Wait", domain=DOMAIN, infer=same_type)
def wait(node: Node, types: Types) -> Kernel:
    """Wait for the attribute ``seconds``, and give what is fed."""
    seconds = node.attrs["seconds"]

    def waited(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return x.copy()

    return Kernel(waited)


def register() -> None:
    """Nothing: to import this module registers the operation; what workers of Ray call first."""
