"""What users hold: sessions, runs, streams."""
