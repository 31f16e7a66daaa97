"""The torch backend: kernels of PyTorch on its CPU device and on CUDA."""
