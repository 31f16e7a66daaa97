"""Artifacts: sessions that were saved."""
