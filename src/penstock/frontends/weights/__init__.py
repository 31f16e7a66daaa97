"""Files of weights without a graph: the graph is made from a configuration and the architecture."""
