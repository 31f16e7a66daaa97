"""Many requests at once: replicas behind a queue."""
