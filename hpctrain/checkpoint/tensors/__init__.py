"""A program's tensors to checkpoints and back; the part that sees torch."""
