"""A program's own checkpoint files, with a manifest of ours that proves them whole."""
