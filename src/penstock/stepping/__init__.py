"""Steps of many requests as one: the state of sequences is in pages, or in rows of a batch."""
