"""Copies of the training state in the memory of the nodes, which outlive the ranks."""
