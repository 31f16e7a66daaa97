"""Interfaces of other runtimes."""
