"""Plans: steps, slots, tasks, streams and memory layout."""
