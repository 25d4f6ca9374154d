"""Checkpoints to and from other programs' formats, and beside each other. Never pickled."""
