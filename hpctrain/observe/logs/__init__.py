"""A run's output as one stream: its sections, what of it is shown, and following it."""
