"""Graph to graph, one pass a module; ``pipeline.optimize`` runs them in turn.

A pass changes a graph in place and says whether it did.
"""
