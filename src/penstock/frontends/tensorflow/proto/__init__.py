"""The messages of TensorFlow's files, as ``graphdef.proto`` declares them; generated."""
