"""Steps of many requests computed together: state is in pages, or in rows of a batch."""
