"""Code shared by the operation families: shape rules, elementwise loops, windows."""
