"""File formats to graphs, one module a format; each third-party parser is imported in one of them."""
