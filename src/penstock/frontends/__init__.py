"""File formats to graphs. Each third-party parser is imported by the modules of one format only."""
