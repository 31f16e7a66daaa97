"""How a plan is run, one module an executor."""
