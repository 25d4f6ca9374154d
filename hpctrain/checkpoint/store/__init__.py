"""Checkpoints of a run: committed, chosen, verified, kept or removed."""
