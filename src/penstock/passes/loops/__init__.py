"""Passes over loops: rows, invariants and products hoisted out of them, recurrences as one node."""
