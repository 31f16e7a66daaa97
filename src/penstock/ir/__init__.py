"""The graph in SSA form, its operations, and names of devices."""
