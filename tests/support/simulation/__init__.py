"""A job of several nodes in one process, in simulated time: real agents, all else stood in."""
