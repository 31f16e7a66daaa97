"""The executors, which run plans, each in a module."""
