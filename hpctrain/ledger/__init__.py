"""A run's directory and events, what follows from them, and what is decided next. No torch."""
