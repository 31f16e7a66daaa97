"""Quantised arithmetic."""
