"""Decisions as pure functions: data in, data out. Nothing here speaks to SLURM, the disk or torch."""
