"""Signal processing: Fourier transforms and windows."""
