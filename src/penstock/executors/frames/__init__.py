"""The frames executor: TensorFlow's tagged tokens."""
