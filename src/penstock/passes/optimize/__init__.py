"""Passes that make a graph smaller or faster on any backend."""
