"""The passes in their order."""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.limits import Limits
from penstock.passes.dead_code import prune
from penstock.passes.lowering.quantize import weights
from penstock.passes.optimize.common_subexpressions import eliminate_common
from penstock.passes.optimize.fold_affine import absorb
from penstock.passes.optimize.fold_constants import fold
from penstock.passes.optimize.fold_padding import take_padding
from penstock.passes.optimize.recompose import compose
from penstock.passes.optimize.simplify import simplify
from penstock.passes.optimize.sink_transposes import delay_transposes

# Each round may open up work for the next (a folded shape makes a reshape known, and so on).
_MOST_ROUNDS = 8


def optimize(graph: Graph, limits: Limits, codes: bool = False) -> None:
    """Simplify a sorted graph in place as far as the types of its inputs allow.

    Idempotent: it is run once when a model is compiled, with dims that may be symbolic, and once
    more for each set of concrete input shapes. With ``codes``, weights that may be of use as 8-bit
    codes are left as they are (see ``quantize.py``).
    """

    def folded(graph: Graph) -> bool:
        return fold(graph, limits, weights(graph) if codes else ())

    prune(graph)
    passes = (
        folded,
        simplify,
        delay_transposes,
        compose,
        take_padding,
        absorb,
        eliminate_common,
        prune,
    )
    quiet = 0  # passes in a row that have found nothing to do
    for each in passes * _MOST_ROUNDS:
        quiet = 0 if each(graph) else quiet + 1
        if quiet == len(passes):
            return
