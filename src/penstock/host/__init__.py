"""Process-wide services: threads, core budget, fork, garbage collection, malloc."""
