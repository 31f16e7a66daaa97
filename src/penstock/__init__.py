"""Penstock, a dataflow runtime for neural networks."""
