"""Passes that lower a graph to backends and devices."""
