"""Measured costs, and the placement they decide."""
