"""Rules on what a step's numbers may be, and what follows. Pure: no torch, no ranks, no files."""
