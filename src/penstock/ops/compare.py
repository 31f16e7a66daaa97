"""Comparisons, logic, bits and selection, element by element."""
