"""Build models in Python, without a file.

::

    import numpy as np
    import penstock as ps
    from penstock.build import GraphBuilder

    b = GraphBuilder()
    x = b.input("x", np.float32, ["n", 4])
    weights = b.constant(np.ones((4, 2), np.float32))
    h = b.op("Relu", x @ weights + 0.5)
    b.output("y", h / b.op("ReduceSum", h, [1]))
    session = ps.compile(b.model())
"""

from penstock.build.graph_builder import GraphBuilder
from penstock.build.symbolic import SymbolicValue

__all__ = ["GraphBuilder", "SymbolicValue"]
