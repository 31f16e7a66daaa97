"""Random numbers, and what is random only in training."""
