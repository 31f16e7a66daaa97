"""Plans as Python source."""
