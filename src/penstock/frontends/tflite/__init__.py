"""The front end for TFLite and Circle files."""
