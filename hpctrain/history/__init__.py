"""What follows from the events: attempts, causes, goodput, lineage; pure functions."""
