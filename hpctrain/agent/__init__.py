"""One agent per node: starts the ranks, bounds how long a stop takes, says how an attempt ended."""
