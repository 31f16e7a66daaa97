"""Passes that fit a graph to backends and devices."""
