"""Analyses of graphs, none of which changes a graph."""
