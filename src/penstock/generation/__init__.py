"""Text that decoders generate: tokens, their choice, and what constrains them."""
