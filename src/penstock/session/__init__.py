"""The user's objects: sessions, runs, streams."""
