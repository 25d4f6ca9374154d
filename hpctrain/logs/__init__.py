"""A run's output as one stream."""
