"""TFLite's files, and Circle's."""
