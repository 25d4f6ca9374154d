"""Facts of a run, appended by all its processes, and what follows. Standard library only."""
