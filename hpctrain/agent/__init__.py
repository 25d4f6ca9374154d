"""One agent per node: starts the ranks, bounds how long a stop may take, decides how the attempt ended."""
