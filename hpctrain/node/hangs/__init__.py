"""Which rank the others wait for, in which collective and at which line."""
