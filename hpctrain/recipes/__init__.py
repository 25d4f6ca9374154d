"""Training programs that hpctrain ships, to be run as they are or copied and changed."""
