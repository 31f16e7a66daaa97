"""Files of weights without a graph, which is built from a configuration and the architecture."""
