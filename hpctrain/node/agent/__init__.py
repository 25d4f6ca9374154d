"""The agent of each node: starts the ranks, bounds how long a stop takes, ends the attempt."""
