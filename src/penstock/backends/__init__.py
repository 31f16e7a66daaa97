"""Where kernels run, one module or folder a backend."""
