"""The version of Penstock, as in its package metadata, which take longer to read."""

VERSION = "0.1.0"
