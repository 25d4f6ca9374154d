"""Decisions as pure functions, data in and data out: no talk to SLURM, the disk or torch."""
