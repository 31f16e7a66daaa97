"""Passes that raise TensorFlow's control flow to If and Loop."""
