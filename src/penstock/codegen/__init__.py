"""Generation of Python source from plans."""
