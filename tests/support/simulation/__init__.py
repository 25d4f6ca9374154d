"""A job of several nodes in one process, in simulated time: real agents, everything else stood in."""
