"""Loop passes: hoisting of rows, invariants and products, and fusion of recurrences."""
