"""Element types: casts, and constants made from attributes."""
