"""The compile line: from a graph and the types of its inputs to an executor."""
