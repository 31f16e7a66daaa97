"""Observers of runs."""
