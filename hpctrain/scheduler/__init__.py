"""Which schedulers there are, and what a run needs of each."""
