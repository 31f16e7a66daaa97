"""LiteRT's Python interface on top of Penstock."""
