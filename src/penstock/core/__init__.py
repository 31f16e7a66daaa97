"""The vocabulary of all folders: types, errors, limits, records, checkpoints."""
