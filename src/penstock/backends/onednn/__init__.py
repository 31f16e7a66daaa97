"""The oneDNN backend."""
