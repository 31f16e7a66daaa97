"""Graphs as files of bytes, and back."""

MAGIC = b"PENSTOCK"
"""The first bytes of an artifact"""
VERSION = 7
"""of the format"""
