"""From a model and samples to a smaller and faster model whose error is bounded."""
