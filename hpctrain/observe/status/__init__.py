"""A run as it is shown: read, put together, and drawn as screen, tables, lines and JSON."""
