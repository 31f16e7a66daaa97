"""Constants that a plan's kernels hold in an order of their own: they are not held twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from penstock.codegen.names import packed_inputs
from penstock.plan.plan import StepTable


def release_constants(table: StepTable) -> int:
    """Drop the contents of constants that all steps of ``table`` read in another order, after its
    program was bound to memory. Later readers get them back from the kernels. Returns about how
    many bytes that frees, unless another object holds them."""
    give_back: dict[int, Callable[[], np.ndarray]] = {}
    read = set(table.outputs)
    for step in table.walk():
        kernel = step.kernel
        held: Mapping[int, Callable[[], np.ndarray]] = {}
        release = None if kernel is None else kernel.packed.release
        if release is not None and packed_inputs(table, step):
            held = release()
        for i, slot in enumerate(step.inputs):
            if i in held:
                give_back[slot] = held[i]
            else:
                read.add(slot)
        for block in step.blocks:
            read.update(block.outputs)
    freed = 0
    for index in give_back.keys() - read:
        constant = table.slots[index].constant
        if constant is not None and constant.held is not None:
            freed += constant.held.nbytes
            constant.release(give_back[index])
    return freed
