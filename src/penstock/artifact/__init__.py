"""Graphs as files of bytes, and back."""
