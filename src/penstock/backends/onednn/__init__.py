"""oneDNN: products, convolutions and what goes with them, at the hardware's limit."""
