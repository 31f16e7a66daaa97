"""The vocabulary of all folders: types, errors, limits, records, checkpoints."""

VERSION = "0.1.0"
"""the version of Penstock, as in its package metadata, which take longer to read"""
