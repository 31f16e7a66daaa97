"""Reductions, searches and running sums along axes."""
