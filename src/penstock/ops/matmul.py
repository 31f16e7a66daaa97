"""Matrix products and what is built of them."""
