"""Graph-to-graph transformations, one pass per module, run by ``pipeline.optimize``.

A pass modifies a graph in place and returns whether it changed anything.
"""
