"""Checkpoints of other libraries, read with distrust, and ours for them."""
