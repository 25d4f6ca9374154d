"""What follows from a run's events: attempts, causes, state, goodput, lineage. Pure functions."""
