"""Attention and the transformer blocks around it."""
