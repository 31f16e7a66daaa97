"""Steps of many requests as one: sequences whose state lies in pages, or in rows of a batch."""
