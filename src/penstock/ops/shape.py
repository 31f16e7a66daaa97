"""Shapes of tensors and views that change them."""
