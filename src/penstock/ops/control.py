"""Control flow: operations that carry graphs."""
