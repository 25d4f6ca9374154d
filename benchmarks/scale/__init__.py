"""A simulator of what hpctrain adds at 64 to 16,384 ranks; `python -m benchmarks.scale`."""
