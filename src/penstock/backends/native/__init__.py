"""Penstock's own compiled kernels, for operations that oneDNN lacks or is slow at."""
