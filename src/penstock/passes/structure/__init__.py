"""Passes between TensorFlow's control-flow primitives and structured If and Loop."""
